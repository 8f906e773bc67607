"""The one check before every route: may this client, is the server still open, by when must the answer be there."""

import asyncio
import math
from collections.abc import Awaitable, Callable

from starlette.requests import Request

from parallm.errors import InvalidRequest
from parallm.server.failures import Draining
from parallm.server.operation.doors import Doors
from parallm.server.operation.keys import StoredKey
from parallm.server.operation.request_context import current_request
from parallm.server.operation.roles import authorize, role_of
from parallm.server.settings import ServerSettings

TIMEOUT_HEADER = "x-request-timeout"


def gate(keys: tuple[StoredKey, ...], settings: ServerSettings, doors: Doors) -> Callable[[Request], Awaitable[None]]:
    """A dependency of all routes, which runs before anything of the body is read."""

    async def check(http: Request) -> None:
        context = current_request.get()
        assert context is not None, "front.py is around every request"
        context.route = http.scope["route"].path_format
        authorize(http, keys, settings)
        if doors.is_closed and _asks_for_work(http):
            seconds = math.ceil(settings.drain_seconds)
            raise Draining(f"the server shuts down and takes no new requests; try again in {seconds} s", seconds)
        seconds_left = _seconds_left(http, settings)
        context.deadline = None if seconds_left is None else asyncio.get_running_loop().time() + seconds_left

    return check


def _asks_for_work(http: Request) -> bool:
    """What only looks, such as `/metrics`, may go on to the end, and what steers training, too."""
    return role_of(http) == "inference" and (http.method == "POST" or http.url.path == "/health_generate")


def _seconds_left(http: Request, settings: ServerSettings) -> float | None:
    """The shorter of what the server and the client allow."""
    given = http.headers.get(TIMEOUT_HEADER)
    if given is None:
        return settings.request_seconds
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"the header {TIMEOUT_HEADER} is {given[:60]!r} and must be a number of seconds above 0")
    return seconds if settings.request_seconds is None else min(seconds, settings.request_seconds)
