"""Threads for work that would block the event loop: large bodies, long texts, grammars, large answers.

The event loop serves every stream, so nothing on it may take longer than `SECONDS_ON_LOOP`. An estimate decides, as a
hop to a thread and back would cost a usual request more than its own work.
"""

import asyncio
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from parallm.errors import EngineFull
from parallm.server.operation.request_context import current_request

SECONDS_ON_LOOP = 0.01
SECONDS_PER_BYTE = 1.5e-6
"""To read a body: its JSON, the checks of its fields, the chat template, the tokens of its texts."""
SECONDS_PER_LOGPROB = 5e-6
"""To write a token of an answer, or one of the likely ones beside it."""
THREADS = 2  # a client uses one at a time, so that another client finds one

Result = TypeVar("Result")


class WorkerPool:
    """Used on the event loop. A function that has begun runs to its end, whatever becomes of its caller."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="request")
        self._free = asyncio.Semaphore(THREADS)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run_if_long(self, function: Callable[[], Result], *, seconds: float) -> Result:
        """`function()`, on a thread if the event loop cannot wait for it. Raises what it raises."""
        return function() if seconds <= SECONDS_ON_LOOP else await self.run(function)

    async def run(self, function: Callable[[], Result], *, max_seconds: float | None = None) -> Result:
        """`function()` on a thread, after the earlier calls of the same client. Raises what it raises.

        Raises TimeoutError if it takes more than `max_seconds` from its beginning.
        """
        turn = self._turns.setdefault(_client(), asyncio.Lock())
        await turn.acquire()
        try:
            await self._free.acquire()
        except BaseException:
            turn.release()
            raise
        work = self._threads.submit(contextvars.copy_context().run, function)
        work.add_done_callback(partial(self._end, asyncio.get_running_loop(), turn))
        return await asyncio.wait_for(asyncio.wrap_future(work), max_seconds)

    def _end(self, loop: asyncio.AbstractEventLoop, turn: asyncio.Lock, _: Future[Any]) -> None:
        def release() -> None:
            self._free.release()
            turn.release()

        with suppress(RuntimeError):  # the event loop has ended, and nothing waits
            loop.call_soon_threadsafe(release)


def _client() -> str:
    context = current_request.get()
    return "" if context is None else context.client


SMALL = 65_536
"""Bytes of a body that count for nothing: usual requests are never refused for those of others."""
BODIES = 64
"""Of the largest kind at once."""


class BodyBudget:
    """Used on the event loop."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = BODIES * max_body_bytes
        self.num_bytes = 0

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """Around one body, which tells how many bytes of it are there. That raises EngineFull beyond the limit."""
        taken = 0

        def grow(num_bytes: int) -> None:
            nonlocal taken
            more = num_bytes - taken
            if num_bytes <= SMALL:
                return
            if self.num_bytes + more > self._max_bytes:
                raise EngineFull(
                    f"request bodies of {self.num_bytes} bytes are being read, the limit is {self._max_bytes}; "
                    "send this one again later"
                )
            self.num_bytes += more
            taken = num_bytes

        try:
            yield grow
        finally:
            self.num_bytes -= taken
