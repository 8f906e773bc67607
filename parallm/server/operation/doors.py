"""Whether new requests come in, and which are inside: what a graceful end needs."""

import asyncio

from parallm.server.operation.request_context import RequestContext


class Doors:
    """Open until `close`. Used on the event loop only."""

    def __init__(self) -> None:
        self.is_closed = False
        self._inside: set[RequestContext] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def open(self) -> None:
        """Let new requests in again."""
        self.is_closed = False

    def close(self) -> None:
        """From now on new requests for completions are refused; those inside go on."""
        self.is_closed = True

    def enter(self, context: RequestContext) -> None:
        if context.is_local:
            return
        self._inside.add(context)
        self._empty.clear()

    def leave(self, context: RequestContext) -> None:
        self._inside.discard(context)
        if not self._inside:
            self._empty.set()

    async def wait_until_empty(self, seconds: float) -> bool:
        """Whether everybody has left within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def cut_off(self) -> None:
        """Let those who are still inside tell their clients that the server ends."""
        for context in self._inside:
            context.is_given_up = True
            if context.give_up is not None:
                context.give_up()
