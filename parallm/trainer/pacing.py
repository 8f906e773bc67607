"""Pause, resume and requests between two steps. `Loop` waits here; HTTP routes and `library` call it.

Used on the asyncio thread only.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from parallm.errors import ParallmError, Unavailable

Result = TypeVar("Result")

MAX_REQUESTS = 16
"""Requests that may wait for the end of a step; each holds a request body."""
POLL_SECONDS = 0.2
"""Interval of `is_ready` calls. A call over 4,096 trajectories takes 5 ms of the event loop."""


class Pacing:
    """Decides when the next step may begin, and serves requests between steps."""

    def __init__(self, save: Callable[[], Awaitable[Path]]) -> None:
        self._save = save
        self._allowed: int | None = None  # steps that may begin while paused; None: not paused
        self._num_begun = 0
        self._num_finished = 0
        self._changed = asyncio.Event()
        self._saves: list[asyncio.Future[Path]] = []
        self._requests: list[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = []
        self._steps: list[tuple[int, asyncio.Future[None]]] = []  # number of finished steps awaited
        self._has_ended = False
        self._is_waiting = False  # between two steps

    @property
    def is_paused(self) -> bool:
        return self._allowed is not None

    @property
    def is_pausing(self) -> bool:
        """Whether a pause is waiting for the end of the present step."""
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
        """Wait for one step: a single new one if paused, else the present one. Raises Unavailable."""
        self._check()
        if self._allowed is not None:
            self._allowed += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._steps.append((self._num_begun + self._allowed if self._allowed else self._num_finished + 1, future))
        self.wake()
        await future

    async def checkpoint(self) -> Path:
        """Save after the present step. Returns the checkpoint's folder. Raises Unavailable, CheckpointError."""
        self._check()
        future: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._saves.append(future)
        self.wake()
        return await future

    async def between_steps(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run `work` after the present step and return its result. Raises Unavailable, also if too many wait."""
        self._check()
        if len(self._requests) >= MAX_REQUESTS:
            raise Unavailable(f"{MAX_REQUESTS} updates wait for the end of the present step already; try again later")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._requests.append((work, future))
        self.wake()
        return await future

    def wake(self) -> None:
        """Wake a waiting loop to check whether it is over."""
        self._changed.set()

    async def before_step(
        self, is_over: Callable[[], bool], on_wait: Callable[[], None], is_ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Return when the next step may begin, or when `is_over`. Runs requests meanwhile.

        `on_wait` is called when the step has to wait. `is_ready` is polled: whether there are groups to train on.
        """
        self._num_finished = self._num_begun
        self._is_waiting = True
        self._complete_steps()
        await self._run_requests()
        while not is_over() and (self._allowed == 0 or not is_ready()):
            on_wait()
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if self._allowed == 0 else POLL_SECONDS)
            await self._run_requests()
        self._is_waiting = False
        self._num_begun += 1
        if self._allowed:
            self._allowed -= 1

    def end(self) -> None:
        """Fail all waiting requests: no further step will come."""
        self._has_ended = True
        for future in (*self._saves, *(future for _, future in (*self._steps, *self._requests))):
            _reject(future, _ended())
        self._saves, self._steps, self._requests = [], [], []

    def _check(self) -> None:
        if self._has_ended:
            raise _ended()

    def _complete_steps(self) -> None:
        for number, future in self._steps:
            if number <= self._num_finished:
                _resolve(future, None)
        self._steps = [(number, future) for number, future in self._steps if not future.done()]

    async def _run_requests(self) -> None:
        """Run all requested work in order, then save once for all save requests."""
        while self._requests:
            work, future = self._requests.pop(0)
            if not future.done():
                await _run(work, future)
        await self._save_for_all()

    async def _save_for_all(self) -> None:
        while waiting := [future for future in self._saves if not future.done()]:
            self._saves = []
            try:
                folder = await self._save()
            except ParallmError as error:
                for future in waiting:
                    _reject(future, error)
            else:
                for future in waiting:
                    _resolve(future, folder)
        self._saves = []


async def _run(work: Callable[[], Awaitable[Any]], future: asyncio.Future[Any]) -> None:
    try:
        _resolve(future, await work())
    except asyncio.CancelledError:
        _reject(future, _ended())
        raise
    except Exception as error:  # noqa: BLE001  belongs to the caller, not to the run
        _reject(future, error)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _ended() -> Unavailable:
    return Unavailable("training has ended; the versions that it made are served on")
