"""How often streams send when there are many: less often, all at the same moment, with more text each time."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

MANY_STREAMS = 16


class StreamCoalescer:
    """A stream that rests finds what it has missed joined into one event by the engine. Used on the event loop only."""

    def __init__(self, coalesce_ms: float) -> None:
        self._seconds = coalesce_ms / 1000
        self._num_streams = 0
        self._beat: asyncio.Event | None = None

    @contextmanager
    def stream(self) -> Iterator[None]:
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    async def rest(self) -> None:
        """Between two events of a stream: until the next beat, which all streams share."""
        if not self._seconds or self._num_streams <= MANY_STREAMS:
            return
        if self._beat is None:
            self._beat = asyncio.Event()
            asyncio.get_running_loop().call_later(self._seconds, self._end_beat)
        await self._beat.wait()

    def _end_beat(self) -> None:
        assert self._beat is not None, "each beat ends once"
        self._beat.set()
        self._beat = None
