"""ASGI middleware around every request: request id, log line, count, drain, early refusals, unexpected errors.

`create_app` adds it outermost, below FastAPI, so that a stream is timed to its end. Refusals by origin and host come
before keys are looked at.

A page of another origin reaches a server on its reader's machine in three ways, and each leaves a header: it sends a
request by script (`Origin`), it embeds an address (`Sec-Fetch-Site`), or it lets its own name mean this machine
(`Host`). Programs send no header but `Host`.
"""

import asyncio
import ipaddress
import logging
import re
import socket
import time
import uuid
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parallm.errors import InvalidRequest, ParallmError
from parallm.server.connection import announced_bytes, error_response
from parallm.server.dashboard.assets import HEADERS as PAGE_HEADERS
from parallm.server.dashboard.assets import PREFIX as PAGE
from parallm.server.failures import ForeignHost, ForeignOrigin, failure_of
from parallm.server.operation.acts import ActLog
from parallm.server.operation.request_context import LOCAL, UNIX, RequestContext, current_request, request_log
from parallm.server.operation.request_metrics import HttpMetrics
from parallm.server.settings import ServerSettings

logger = logging.getLogger(__name__)

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
CLIENT_CLOSED_REQUEST = 499  # no client reads it; access logs of proxies know the number
MAX_UNREAD = 1 << 20
"""Bytes of a body that may come after the answer. A connection with more to come is closed, and a client that is still
sending may see that before the answer."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
HOST = re.compile(r"(?:\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::\d*)?")
PAGES = ("/docs", "/docs/try", "/openapi.json", "/", PAGE, f"{PAGE}/")
"""Paths that a link of any page may lead to."""
VIEWS = frozenset({"/health", "/ready", "/metrics", "/v1/metrics", "/v1/status", "/v1/events"})
"""Paths that programs ask again and again although nobody uses the server."""
ACTING_GETS = ("/flush_cache", "/health_generate")
"""Paths that SGLang's clients GET although they act. Older browsers embed an address without `Sec-Fetch-Site`."""


SECONDS_BETWEEN_LOOKS = 0.01


class Drain:
    """Requests in flight, and whether new ones are refused because the server ends. On the event loop only."""

    def __init__(self) -> None:
        self.is_draining = False
        self._in_flight: set[RequestContext] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._watchers: dict[RequestContext, Callable[[], None]] = {}
        self._last_left = time.monotonic()

    def begin(self) -> None:
        """Refuse new requests for completions from now on; those in flight go on."""
        self.is_draining = True

    def cancel(self) -> None:
        """Accept new requests again."""
        self.is_draining = False

    def enter(self, context: RequestContext) -> None:
        if context.is_local:
            return
        self._in_flight.add(context)
        self._empty.clear()

    def watch(self, end: Callable[[], None]) -> None:
        """Count the present request no longer as one in flight: it goes on until `end` is called."""
        context = current_request.get()
        assert context is not None, "this middleware is around every request"
        context.is_watching, context.deadline = True, None
        self.leave(context)
        self._watchers[context] = end

    async def end_watchers(self, seconds: float) -> None:
        """Let watchers go, and wait until they have left or `seconds` are over."""
        ends = time.monotonic() + seconds
        while self._watchers and time.monotonic() < ends:
            for end in self._watchers.values():
                end()
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    def leave(self, context: RequestContext) -> None:
        self._watchers.pop(context, None)
        self._in_flight.discard(context)
        if context.route not in VIEWS:
            self._last_left = time.monotonic()
        if not self._in_flight:
            self._empty.set()

    def touch(self) -> None:
        """Count what is not a request, such as a job, as one that ends now."""
        self._last_left = time.monotonic()

    def idle_seconds(self) -> float:
        """Return the seconds since the end of the last request but of views, 0 while there is any."""
        return 0.0 if self._in_flight else time.monotonic() - self._last_left

    async def wait_until_empty(self, seconds: float) -> bool:
        """Return whether all requests have ended within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def cut_off(self) -> None:
        """Let requests in flight answer that the server ends."""
        for context in self._in_flight:
            context.is_given_up = True
            if context.give_up is not None:
                context.give_up()


class Origins:
    """Checks by which host and from which page of a browser a request comes."""

    def __init__(self, settings: ServerSettings, *, has_keys: bool) -> None:
        self._allowed_origins = frozenset(settings.cors_origins)
        self._own_names = _own_names(settings, has_keys=has_keys)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises ForeignHost, ForeignOrigin."""
        if UNIX not in scope:  # no page reaches a unix socket by any name
            self._check_host(headers)
        origin = headers.get("origin")
        if "*" in self._allowed_origins or origin in self._allowed_origins:
            return
        is_foreign = origin is not None and not _is_same_server(origin, headers)
        if is_foreign or self._is_embedded(scope["method"], scope["path"], headers):
            raise ForeignOrigin(
                "requests of pages from other origins are refused; name the origin in server.cors_origins"
            )

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host")
        if host is None or self._own_names is None:  # HTTP/1.0 needs none, and browsers always send one
            return
        name = _host_name(host)
        if name not in self._own_names and _address(name) is None:
            raise ForeignHost(
                f"{host[:100]!r} is no name of this server; call it by its address or as localhost, or add the name "
                "to server.allowed_hosts"
            )

    def _is_embedded(self, method: str, path: str, headers: Headers) -> bool:
        """Return whether a page of another origin has made the browser fetch this."""
        site = headers.get("sec-fetch-site")
        if site is None:
            referer = headers.get("referer") if method == "GET" and path in ACTING_GETS else None
            return referer is not None and not _is_same_server(referer, headers)
        is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return site not in ("same-origin", "none") and not (is_link and method == "GET" and path in PAGES)


class RequestMiddleware:
    """A request without a usable `x-request-id` gets one; the response carries it."""

    def __init__(
        self, app: ASGIApp, *, request_metrics: HttpMetrics, drain: Drain, origins: Origins, acts: ActLog
    ) -> None:
        self._app = app
        self._acts = acts
        self._origins = origins
        self._request_metrics = request_metrics
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        address = scope["client"][0] if scope.get("client") else ""
        context = RequestContext(
            request_id=_request_id(headers), headers=headers, address=address, is_local=LOCAL in scope
        )
        began, status = time.perf_counter(), CLIENT_CLOSED_REQUEST  # stays unless a response begins
        is_read = announced_bytes(headers) <= MAX_UNREAD

        async def receive_and_note() -> Message:
            nonlocal is_read
            message = await receive()
            is_read |= message["type"] == "http.request" and not message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = context.request_id
                if scope["path"].startswith(PAGE):
                    MutableHeaders(scope=message).update(PAGE_HEADERS)
                if not is_read:  # else uvicorn reads the remaining body, however long, to keep the connection
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        token = current_request.set(context)
        self._drain.enter(context)
        try:
            _check_framing(headers)
            self._origins.check(scope, headers)
            await self._app(scope, receive_and_note, send_with_id)
        except Exception as error:
            if status != CLIENT_CLOSED_REQUEST:
                raise  # a response has begun: all that is left is to close the connection
            if not isinstance(error, ParallmError):
                logger.exception("%s %s failed", scope["method"], context.route)
            await error_response(failure_of(error))(scope, receive, send_with_id)
        finally:
            self._report(scope, context, status, time.perf_counter() - began)
            if context.act is not None:
                self._acts.note(context, context.act, status)
            self._drain.leave(context)
            current_request.reset(token)

    def _report(self, scope: Scope, context: RequestContext, status: int, seconds: float) -> None:
        route = context.route  # the path of the route, not of the request, or a client could make any number of series
        handler, method = route or "none", scope["method"] if scope["method"] in METHODS else "other"
        self._request_metrics.http_requests.labels(handler=handler, method=method, status=f"{status // 100}xx").inc()
        if not context.is_watching:
            self._request_metrics.http_seconds.labels(handler=handler, method=method).observe(seconds)
        if request_log.isEnabledFor(logging.INFO):
            fields = {
                "request_id": context.request_id,
                "method": scope["method"],
                "path": route or scope["path"][:200],
                "status": status,
                "seconds": round(seconds, 6),
                "api_key": context.api_key,
                "model": context.model,
                "prompt_tokens": context.num_prompt_tokens,
                "completion_tokens": context.num_completion_tokens,
            }
            request_log.info("request", extra={"fields": fields})


def _check_framing(headers: Headers) -> None:
    """Raise InvalidRequest for a body of two lengths: a proxy may see another end of it than this server does."""
    if "content-length" in headers and "transfer-encoding" in headers:
        raise InvalidRequest("a request has either Content-Length or Transfer-Encoding; send one of them")


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _own_names(settings: ServerSettings, *, has_keys: bool) -> frozenset[str] | None:
    """Return the names of this server in small letters; None: every name counts."""
    given = {name.lower() for name in settings.allowed_hosts}
    is_for_others = has_keys and not _is_loopback(settings.host) and not given
    if "*" in given or is_for_others:
        return None
    return frozenset({"localhost", settings.host.lower(), socket.gethostname().lower(), *given})


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _host_name(host: str) -> str:
    """Return the name without the port, in small letters; empty for what is no host."""
    match = HOST.fullmatch(host)
    return "" if match is None else (match["address"] or match["name"]).lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address, which no name service can make mean another machine, or None for a name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_same_server(address: str, headers: Headers) -> bool:
    """Return whether an origin or a referer belongs to the server that this request calls."""
    try:
        netloc = urlsplit(address).netloc
    except ValueError:
        return False
    return bool(netloc) and netloc.lower() == headers.get("host", "").lower()
