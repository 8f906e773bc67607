"""Server-sent events: one `data:` line for each chunk, a response that ends with its client, streams as one."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from parallm.errors import ParallmError
from parallm.server.connection import while_connected
from parallm.server.failures import DeadlineExceeded, Draining, failure_of

logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"


def encode_events(chunks: Iterable[BaseModel]) -> bytes:
    return b"".join(b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n" for chunk in chunks)


def failed(error: Exception) -> bytes:
    """Return the last event of a stream that cannot go on."""
    return encode_events([failure_of(error).answer])


class EventStream(Response):
    """Sends `events` until they end, the client leaves or stops reading, or the request's time is over.

    Then it closes `events` and `source`, which `events` reads: a generator that never started closes nothing itself.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: AsyncGenerator[object, None],
        *,
        name: str,
        stall_seconds: float,
        failed: Callable[[Exception], bytes] = failed,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._name = name
        self._stall_seconds = stall_seconds
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await while_connected(receive, self._send_events(send))
        except (DeadlineExceeded, Draining) as error:
            with suppress(ClientDisconnect):
                await self._send(send, self._failed(error), is_last=True)
        except ClientDisconnect:
            pass  # no client is left to answer
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send_events(self, send: Send) -> None:
        while (event := await self._next_event()) is not None:
            await self._send(send, event)
        await self._send(send, b"", is_last=True)

    async def _next_event(self) -> bytes | None:
        """Return the next event, None at the end. A failure becomes the last event."""
        try:
            return await anext(self._events, None)
        except Exception as error:
            if not isinstance(error, ParallmError):  # the status is sent already: the log alone can hold the cause
                logger.exception("the stream %s failed", self._name)
            return self._failed(error)

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        """Wait while the client's buffers are full. Raises ClientDisconnect if it takes nothing for too long."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        except TimeoutError as error:
            raise ClientDisconnect from error


Item = TypeVar("Item")


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all streams as they come, each with the number of its stream.

    The first error of any stream is raised here. Closing this closes all streams.
    """
    if len(streams) == 1:  # no queue, so that the stream is asked only when its reader wants more
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | int] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            message = await queue.get()
            if isinstance(message, int):
                await tasks[message]  # raises what ended the stream
                num_open -= 1
            else:
                yield message
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    number: int, stream: AsyncGenerator[Item, None], queue: "asyncio.Queue[tuple[int, Item] | int]"
) -> None:
    """Move the items of one stream into `queue`, and at its end, well or not, its number."""
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((number, item))
    finally:
        queue.put_nowait(number)
