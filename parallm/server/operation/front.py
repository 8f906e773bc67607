"""Around every request: its id, its line in the log, its count, what is refused before any route, and the last place
for an unexpected error.

Below FastAPI, so that a stream is timed to its end.
"""

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parallm.errors import InvalidRequest, ParallmError
from parallm.server.connection import announced_bytes, error_response
from parallm.server.failures import failure_of
from parallm.server.operation.doors import Doors
from parallm.server.operation.meters import Meters
from parallm.server.operation.origins import Origins
from parallm.server.operation.request_context import LOCAL, RequestContext, current_request
from parallm.server.operation.request_log import request_log

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; access logs of proxies know the number
MOST_UNREAD = 1 << 20
"""Bytes of a body that may come after the answer. A connection with more to come is closed, and a client that is still
sending may see that before the answer."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Front:
    """ASGI middleware. A request without a usable `x-request-id` gets one; the response says it."""

    def __init__(self, app: ASGIApp, *, meters: Meters, doors: Doors, origins: Origins) -> None:
        self._app = app
        self._origins = origins
        self._meters = meters
        self._doors = doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        address = scope["client"][0] if scope.get("client") else ""
        context = RequestContext(
            request_id=_request_id(headers), headers=headers, address=address, is_local=LOCAL in scope
        )
        began, status = time.perf_counter(), CLIENT_CLOSED_REQUEST  # unless a response begins, the client has gone
        is_read = announced_bytes(headers) <= MOST_UNREAD

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
                if not is_read:  # else uvicorn reads the rest, however long, to keep the connection
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        token = current_request.set(context)
        self._doors.enter(context)
        try:
            _check_framing(headers)
            self._origins.check(scope["method"], scope["path"], headers)
            await self._app(scope, receive_and_note, send_with_id)
        except Exception as error:
            if status != CLIENT_CLOSED_REQUEST:
                raise  # a response has begun: all that is left is to close the connection
            if not isinstance(error, ParallmError):
                logger.exception("%s %s failed", scope["method"], context.route)
            await error_response(failure_of(error))(scope, receive, send_with_id)
        finally:
            self._tell(scope, context, status, time.perf_counter() - began)
            self._doors.leave(context)
            current_request.reset(token)

    def _tell(self, scope: Scope, context: RequestContext, status: int, seconds: float) -> None:
        route = context.route
        self._meters.http_request(route, scope["method"], status, seconds)
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
    """Raises InvalidRequest for a body of two lengths: a proxy may see another end of it than this server does."""
    if "content-length" in headers and "transfer-encoding" in headers:
        raise InvalidRequest("a request has either Content-Length or Transfer-Encoding; send one of them")


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
