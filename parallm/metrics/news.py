"""Events of a process for its watchers: a bounded queue for each.

On the event loop alone, but for `tell_soon`. Without watchers an event costs a call.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from parallm.metrics.json_lines import encode_json

MAX_EVENTS = 256
"""Events that wait for one watcher. One that is slower loses them all and gets one event that says so."""
MAX_WATCHERS = 64
REPLACED = ("status", "pulse")
"""Kinds of which a later event makes an earlier one of the same policy worthless."""
LOST, BYE = "lost", "bye"


@dataclass(frozen=True, slots=True)
class Event:
    """One event as it is sent, and what it is about."""

    kind: str
    policy: str
    text: bytes
    """Server-sent event, with its empty line."""


def event_of(kind: str, data: Mapping[str, Any], policy: str = "") -> Event:
    return Event(kind, policy, b"event: " + kind.encode() + b"\ndata: " + encode_json(data) + b"\n\n")


class Watcher:
    """The events for one watcher, in their order. `News.watch` makes it."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._is_ended = False

    def put(self, event: Event) -> None:
        if self._is_ended:
            return
        if event.kind in REPLACED:
            self._forget(event)
        if len(self._events) >= MAX_EVENTS:
            self._events.clear()
            self._events.append(event_of(LOST, {}))
        self._events.append(event)
        self._arrived.set()

    def end(self, reason: str) -> None:
        """Let the watcher leave after one last event, whatever waits."""
        if not self._is_ended:
            self._events.clear()
            self.put(event_of(BYE, {"reason": reason}))
            self._is_ended = True

    async def next(self, seconds: float) -> Event | None:
        """Return the next event, or None if none comes in time. Raises StopAsyncIteration after the last one."""
        if not self._events and self._is_ended:
            raise StopAsyncIteration
        if not self._events:
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._arrived.wait()
        return self._events.popleft() if self._events else None

    def _forget(self, event: Event) -> None:
        """Remove an earlier event that says the same."""
        for earlier in self._events:
            if (earlier.kind, earlier.policy) == (event.kind, event.policy):
                self._events.remove(earlier)
                return


class News:
    """Tells events to all watchers. Made anywhere, used on one event loop from the first watcher on."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """Add a watcher, who gets every event from now on."""
        self._loop = asyncio.get_running_loop()
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def tell(self, kind: str, data: Mapping[str, Any], policy: str = "") -> None:
        """Tell an event of this policy, or of the whole process. The data is made JSON once."""
        if not self._watchers:
            return
        event = event_of(kind, {"policy": policy, **data}, policy)
        for watcher in self._watchers:
            watcher.put(event)

    def tell_soon(self, kind: str, make: Callable[[], Mapping[str, Any]]) -> None:
        """Do the same from any thread; `make` is called on the event loop if anyone watches."""
        if self._watchers and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and with it all watchers
                self._loop.call_soon_threadsafe(lambda: self.tell(kind, make()))

    def end(self, reason: str) -> None:
        """Let all watchers leave."""
        for watcher in self._watchers:
            watcher.end(reason)
