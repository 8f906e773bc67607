"""The arguments of both clients, checked: the server's address, the headers, the options of a new HTTP client."""

import ssl
from dataclasses import dataclass, field
from typing import Any

DEFAULT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Headers of every request, and options of a new httpx client."""

    base_url: str
    headers: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)


def connection(
    base_url: str, *, api_key: str | None, timeout: float | None, verify: ssl.SSLContext | bool | None, http: Any
) -> Connection:
    """Check the arguments of a client. `http` is None or an HTTP client of the caller.

    Raises ValueError for a key that no header holds, and for arguments that contradict `http` or need a new client.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {_checked(api_key)}"}
    if http is None:
        if not base_url:
            raise ValueError("base_url is empty; give the server's address, such as http://localhost:8000")
        options = {
            "timeout": DEFAULT_SECONDS if timeout is None else timeout,
            "verify": True if verify is None else verify,
        }
        return Connection(base_url=base_url.rstrip("/"), headers=headers, options=options)
    for name, value in (("timeout", timeout), ("verify", verify)):
        if value is not None:
            raise ValueError(
                f"{name} belongs to the client that is given as http; make that with it, or leave http out"
            )
    own = str(http.base_url).rstrip("/")
    if own and base_url and own != base_url.rstrip("/"):
        raise ValueError(f"base_url is {base_url}, and that of http is {own}; leave one of them out")
    if api_key is not None and http.headers.get("authorization") not in (None, headers["Authorization"]):
        raise ValueError("api_key differs from the key in the headers of http; leave one of them out")
    if not own and not base_url:
        raise ValueError("neither base_url nor http says where the server is; give base_url")
    return Connection(base_url=own or base_url.rstrip("/"), headers=headers)


def _checked(api_key: str) -> str:
    """Refuse a wrong key here, since the error of the HTTP client would show it."""
    if not api_key.strip():
        raise ValueError("api_key is empty; leave it out for a server without keys")
    if api_key != api_key.strip():
        raise ValueError("api_key has white space around it, as a line of a file has its end; give api_key.strip()")
    return api_key
