"""What is peculiar to one HTTP connection: reading a bounded body, and noticing that the client has gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from parallm.server.failures import BodyTooLarge, DeadlineExceeded, Draining
from parallm.server.operation.request_context import RequestContext, current_request

Result = TypeVar("Result")


async def read_body(http: Request, max_bytes: int, setting: str = "max_body_bytes") -> bytes:
    """The whole body. Raises BodyTooLarge as soon as it is known to be larger than `max_bytes`, as `setting` says."""
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the request body is larger than {max_bytes} bytes; raise server.{setting}")
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client goes or the request's time is over before it is there.

    The body must have been read before. Raises ClientDisconnect, DeadlineExceeded, Draining.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    context = current_request.get()
    if context is not None:
        context.give_up = watching.cancel
        if context.is_given_up:  # between the first event of a stream and its response
            watching.cancel()
    try:
        await asyncio.wait((working, watching), timeout=_seconds_left(context), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if watching.cancelled():
            raise Draining("the server has ended before the answer was complete; ask again, another one or later", 1)
        if watching.done():
            raise ClientDisconnect
        raise DeadlineExceeded(
            "the answer was not complete in its time; ask for fewer tokens, send a longer x-request-timeout or raise "
            "server.request_seconds"
        )
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _seconds_left(context: RequestContext | None) -> float | None:
    if context is None or context.deadline is None:
        return None
    return max(0.0, context.deadline - asyncio.get_running_loop().time())


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
