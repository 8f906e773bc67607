"""Server-sent events: one `data:` line for each chunk, and a response that ends when the client goes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from parallm.server.connection import while_connected
from parallm.server.failures import DeadlineExceeded, Draining, failure_of

DONE = b"data: [DONE]\n\n"


def encode_events(chunks: Iterable[BaseModel]) -> bytes:
    return b"".join(b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n" for chunk in chunks)


def failed(error: Exception) -> bytes:
    """The last event of a stream that cannot go on."""
    return encode_events([failure_of(error).answer])


class EventStream(Response):
    """Sends what `events` yields, until that ends, the client goes or stops reading, or the request's time is over.

    Then it closes `events` and `source`, which `events` reads: a generator that never started closes nothing itself.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: AsyncGenerator[object, None],
        *,
        stall_seconds: float,
        failed: Callable[[Exception], bytes] = failed,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._source = source
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
            pass  # nobody is left to tell
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send_events(self, send: Send) -> None:
        async for event in self._events:
            await self._send(send, event)
        await self._send(send, b"", is_last=True)

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        """Waits while the client's buffers are full. Raises ClientDisconnect if it takes nothing for too long."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        except TimeoutError as error:
            raise ClientDisconnect from error


Item = TypeVar("Item")
Inbox: TypeAlias = asyncio.Queue[tuple[int, Item] | int]


async def merged(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of all streams as they come, each with the number of its stream.

    The first error of any stream is raised here. Closing this closes them all.
    """
    if len(streams) == 1:
        # without a queue in between, so that a stream is asked only when its reader wants more
        try:
            async for item in streams[0]:
                yield 0, item
        finally:
            await close(streams[0])
        return
    queue: Inbox[Item] = asyncio.Queue()
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


async def _pump(number: int, stream: AsyncIterator[Item], queue: Inbox[Item]) -> None:
    """Consumes one stream into `queue`; its number alone says that it has ended, well or not, and is closed."""
    try:
        async for item in stream:
            queue.put_nowait((number, item))
    finally:
        await close(stream)
        queue.put_nowait(number)


async def close(stream: AsyncIterator[object]) -> None:
    """Run a generator's clean-up now and not when it is collected."""
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()
