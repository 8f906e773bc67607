"""Whether new requests come in, and how many are inside: what a graceful end needs."""

import asyncio


class Doors:
    """Open until `close`. Used on the event loop only."""

    def __init__(self) -> None:
        self.is_closed = False
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_inside(self) -> int:
        return self._num_inside

    def close(self) -> None:
        """From now on new requests for completions are refused; those inside go on."""
        self.is_closed = True

    def enter(self) -> None:
        self._num_inside += 1
        self._empty.clear()

    def leave(self) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            self._empty.set()

    async def wait_until_empty(self, seconds: float) -> bool:
        """Whether everybody has left within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
