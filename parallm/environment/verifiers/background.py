"""An event loop in a thread of its own, for environments whose coroutines may block: HTTP is answered meanwhile."""

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

T = TypeVar("T")
CLOSE_SECONDS = 10.0


class BackgroundLoop:
    """Runs coroutines until the process ends. Usable from any thread and from any other event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()  # entered and closed on this loop: servers that live as long as the process
        # a daemon: an environment that hangs must not hold up the end of the process
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()
        atexit.register(self._close)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Blocks the calling thread, which must not be this loop's own."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def get(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, awaited on the caller's loop; cancelled with it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def soon(self, function: Callable[[], object]) -> None:
        """Call `function` on this loop, some time."""
        self._loop.call_soon_threadsafe(function)

    def _close(self) -> None:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self.stack.aclose(), self._loop).result(CLOSE_SECONDS)
