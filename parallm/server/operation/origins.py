"""Which names and which pages of browsers a request may come with. Refusals here come before keys are looked at.

A page of a stranger reaches a server on its reader's machine in three ways, which each leave a header: it sends a
request by script (`Origin`), it embeds an address (`Sec-Fetch-Site`), or it lets its own name mean this machine
(`Host`). Programs send no header but `Host`.
"""

import ipaddress
import re
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from parallm.server.failures import ForeignHost, ForeignOrigin
from parallm.server.settings import ServerSettings

HOST = re.compile(r"(?:\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::\d*)?")
PAGES = ("/docs", "/docs/try")
"""What a link of any page may lead to."""
ACTING_GETS = ("/flush_cache", "/health_generate")
"""What SGLang's clients ask with GET although it acts. Older browsers embed an address without `Sec-Fetch-Site`."""


class Origins:
    """Checks each request of one server."""

    def __init__(self, settings: ServerSettings, *, has_keys: bool) -> None:
        self._named = frozenset(settings.cors_origins)
        self._names = _own_names(settings, has_keys=has_keys)

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Raises ForeignHost, ForeignOrigin."""
        self._check_host(headers)
        origin = headers.get("origin")
        if "*" in self._named or origin in self._named:
            return
        is_foreign = origin is not None and not _is_of(origin, headers)
        if is_foreign or self._is_embedded(method, path, headers):
            raise ForeignOrigin(
                "requests of pages from other origins are refused; name the origin in server.cors_origins"
            )

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host")
        if host is None or self._names is None:  # HTTP/1.0 needs none, and browsers always send one
            return
        called = _host_name(host)
        if called not in self._names and not _is_address(called):
            raise ForeignHost(
                f"{host[:100]!r} is no name of this server; call it by its address or as localhost, or add the name "
                "to server.allowed_hosts"
            )

    def _is_embedded(self, method: str, path: str, headers: Headers) -> bool:
        """Whether a page of another origin has made the browser fetch this."""
        site = headers.get("sec-fetch-site")
        if site is None:
            referer = headers.get("referer") if method == "GET" and path in ACTING_GETS else None
            return referer is not None and not _is_of(referer, headers)
        is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return site not in ("same-origin", "none") and not (is_link and method == "GET" and path in PAGES)


def _own_names(settings: ServerSettings, *, has_keys: bool) -> frozenset[str] | None:
    """In small letters; None: whatever name a client uses."""
    given = {name.lower() for name in settings.allowed_hosts}
    is_for_others = has_keys and not _is_loopback(settings.host) and not given
    if settings.uds or "*" in given or is_for_others:
        return None
    return frozenset({"localhost", settings.host.lower(), socket.gethostname().lower(), *given})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_name(host: str) -> str:
    """Without the port, in small letters; empty for what is no host."""
    found = HOST.fullmatch(host)
    return "" if found is None else (found["address"] or found["name"]).lower()


def _is_address(called: str) -> bool:
    """No name service is asked for an address, so none can make it mean another machine."""
    try:
        ipaddress.ip_address(called)
    except ValueError:
        return False
    return True


def _is_of(address: str, headers: Headers) -> bool:
    """Whether an origin or a referer is of the server that this request calls."""
    try:
        netloc = urlsplit(address).netloc
    except ValueError:
        return False
    return bool(netloc) and netloc.lower() == headers.get("host", "").lower()
