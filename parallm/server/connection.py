"""What is peculiar to one HTTP connection: reading a bounded body, and noticing that the client has gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from parallm.server.failures import BodyTooLarge

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
    """The result of `work`, which is cancelled if the client goes first or the caller is cancelled.

    The body must have been read before. Raises ClientDisconnect.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
