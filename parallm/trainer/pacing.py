"""Between two steps a loop comes by here: it waits while it is paused, and does what others have asked for.

Used on the asyncio thread only.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from parallm.errors import ParallmError, Unavailable

Result = TypeVar("Result")

MAX_WORKS = 16
"""Works that may wait for the end of a step; each holds the body of a request."""
SECONDS_BETWEEN_LOOKS = 0.2
"""At something to train on. A look at 4,096 trajectories takes 5 ms of the event loop."""


class Pacing:
    """When the next step may begin, and who waits for what."""

    def __init__(self, save: Callable[[], Awaitable[Path]]) -> None:
        self._save = save
        self._allowed: int | None = None  # steps that may begin while paused; None: not paused
        self._num_begun = 0
        self._num_finished = 0
        self._changed = asyncio.Event()
        self._saves: list[asyncio.Future[Path]] = []
        self._works: list[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = []
        self._steps: list[tuple[int, asyncio.Future[None]]] = []  # how many are finished then
        self._has_ended = False
        self._is_waiting = False  # between two steps

    @property
    def is_paused(self) -> bool:
        return self._allowed is not None

    @property
    def is_pausing(self) -> bool:
        """Whether a pause waits for the end of the present step."""
        return self.is_paused and not self._is_waiting and not self._has_ended

    def pause(self) -> None:
        """Begin no further step; the present one ends first. Raises Unavailable if training has ended."""
        self._check()
        if self._allowed is None:
            self._allowed = 0

    def resume(self) -> None:
        """Begin steps again. Raises Unavailable if training has ended."""
        self._check()
        self._allowed = None
        self.wake()

    async def step(self) -> None:
        """Wait for one more step: a new one if paused, which stays so, else the one at work. Raises Unavailable."""
        self._check()
        if self._allowed is not None:
            self._allowed += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._steps.append((self._num_begun + self._allowed if self._allowed else self._num_finished + 1, future))
        self.wake()
        await future

    async def checkpoint(self) -> Path:
        """Save after the present step; the checkpoint's folder. Raises Unavailable, CheckpointError."""
        self._check()
        future: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._saves.append(future)
        self.wake()
        return await future

    async def between_steps(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do `work` after the present step and return its result. Raises Unavailable, also if too many wait."""
        self._check()
        if len(self._works) >= MAX_WORKS:
            raise Unavailable(f"{MAX_WORKS} updates wait for the end of the present step already; try again later")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._works.append((work, future))
        self.wake()
        return await future

    def wake(self) -> None:
        """Let a loop that waits look again whether it is over."""
        self._changed.set()

    async def before_step(
        self, is_over: Callable[[], bool], on_wait: Callable[[], None], is_ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Before each step: returns when it may begin, or when there is none to begin. `on_wait`: it has to wait.

        `is_ready`: whether there is something to train on; it is asked again and again.
        """
        self._num_finished = self._num_begun
        self._is_waiting = True
        self._complete_steps()
        await self._do_all()
        while not is_over() and (self._allowed == 0 or not is_ready()):
            on_wait()
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if self._allowed == 0 else SECONDS_BETWEEN_LOOKS)
            await self._do_all()
        self._is_waiting = False
        self._num_begun += 1
        if self._allowed:
            self._allowed -= 1

    def end(self) -> None:
        """Tell everybody that no step will come any more."""
        self._has_ended = True
        for saved in self._saves:
            _fail(saved)
        for _, waiting in (*self._steps, *self._works):
            _fail(waiting)
        self._saves, self._steps, self._works = [], [], []

    def _check(self) -> None:
        if self._has_ended:
            raise _ended()

    def _complete_steps(self) -> None:
        for number, future in self._steps:
            if number <= self._num_finished and not future.done():
                future.set_result(None)
        self._steps = [(number, future) for number, future in self._steps if not future.done()]

    async def _do_all(self) -> None:
        """Do all requested works in the order of the calls, then save for all that requested it."""
        while self._works:
            work, future = self._works.pop(0)
            if not future.done():
                await _do(work, future)
        await self._save_for_all()

    async def _save_for_all(self) -> None:
        while waiting := [future for future in self._saves if not future.done()]:
            self._saves = []
            try:
                folder = await self._save()
            except ParallmError as error:
                for future in waiting:
                    if not future.done():
                        future.set_exception(error)
            else:
                for future in waiting:
                    if not future.done():
                        future.set_result(folder)
        self._saves = []


async def _do(work: Callable[[], Awaitable[Any]], future: asyncio.Future[Any]) -> None:
    try:
        result = await work()
    except asyncio.CancelledError:
        _fail(future)
        raise
    except Exception as error:  # noqa: BLE001  it is for those who have asked, and costs the run nothing
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(result)


def _fail(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(_ended())


def _ended() -> Unavailable:
    return Unavailable("training has ended; the versions that it made are served on")
