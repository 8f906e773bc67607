"""Stream coalescing: many open streams send less often, all at the same moment, with more text each time.

The engine joins into one event what a stream has missed. The engine gateway has one coalescer, on the event loop only.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

MANY_STREAMS = 16


class StreamCoalescer:
    """Counts the open streams, and lets each wait between two of its events."""

    def __init__(self, coalesce_ms: float) -> None:
        self._seconds = coalesce_ms / 1000
        self._num_streams = 0
        self._tick: asyncio.Event | None = None

    @contextmanager
    def stream(self) -> Iterator[None]:
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    async def wait(self) -> None:
        """Wait for the next tick, which all streams share; return at once while there are few."""
        if not self._seconds or self._num_streams <= MANY_STREAMS:
            return
        if self._tick is None:
            self._tick = asyncio.Event()
            asyncio.get_running_loop().call_later(self._seconds, self._end_tick)
        await self._tick.wait()

    def _end_tick(self) -> None:
        assert self._tick is not None, "each tick ends once"
        self._tick.set()
        self._tick = None
