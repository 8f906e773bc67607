"""Pause, resume and requests between two steps. `Loop` waits here; HTTP routes and `library` call it.

Used on the asyncio thread only.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from parallm.errors import Unavailable
from parallm.reports import EvaluationReport

Result = TypeVar("Result")
What = TypeVar("What")
Work = Callable[[], Awaitable[Any]]
Save = Callable[[], Awaitable[Path]]
Evaluate = Callable[[], Awaitable[EvaluationReport]]

MAX_REQUESTS = 16
"""Requests that may wait for the end of a step; each holds a request body."""
POLL_SECONDS = 0.2
"""Interval of `is_ready` calls. A call over 4,096 trajectories takes 5 ms of the event loop."""


class Pacing:
    """Decides when the next step may begin, and serves requests between steps."""

    def __init__(self, save: Save, evaluate: Evaluate) -> None:
        self._save = save
        self._evaluate = evaluate
        self._allowed: int | None = None  # steps that may begin while paused; None: not paused
        self._num_begun = 0
        self._num_finished = 0
        self._changed = asyncio.Event()
        self._requests: list[tuple[Work, asyncio.Future[Any]]] = []
        self._steps: list[tuple[int, asyncio.Future[None]]] = []  # number of finished steps awaited
        self._ended = asyncio.Event()
        self._is_waiting = False  # between two steps
        self.stopping = asyncio.Event()
        """Set when the run is to finish its step, save and end."""
        self.serves_on = False
        """Whether `finish` has ended the run, after which the process goes on serving."""
        self._longest_pause: float | None = (
            None  # seconds between two looks at requests while paused; None: until woken
        )

    @property
    def is_paused(self) -> bool:
        return self._allowed is not None

    @property
    def is_pausing(self) -> bool:
        """Whether a pause is waiting for the end of the present step."""
        return self.is_paused and not self._is_waiting and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether no further step will come."""
        return self._ended.is_set()

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
        """Wait for one step: a single new one if paused, else the present one. Raises Unavailable, also by
        `refuse_steps`."""
        self._check()
        if self._allowed is not None:
            self._allowed += 1
        number = self._num_begun + self._allowed if self._allowed else self._num_finished + 1
        await self._queue(self._steps, number)

    async def checkpoint(self) -> Path:
        """Save after the present step. Returns the checkpoint's folder. Raises Unavailable, CheckpointError."""
        self._check()
        folder: Path = await self._queue(self._requests, self._save)
        return folder

    async def evaluate(self) -> EvaluationReport:
        """Evaluate the newest version after the present step. Raises Unavailable, EnvironmentFailed."""
        self._check()
        report: EvaluationReport = await self._queue(self._requests, self._evaluate)
        return report

    async def between_steps(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run `work` after the present step and return its result. Raises Unavailable, also if too many wait."""
        self._check()
        if sum(waiting not in (self._save, self._evaluate) for waiting, _ in self._requests) >= MAX_REQUESTS:
            raise Unavailable(f"{MAX_REQUESTS} updates wait for the end of the present step already; try again later")
        result: Result = await self._queue(self._requests, work)
        return result

    async def _queue(self, waiting: list[tuple[What, asyncio.Future[Any]]], what: What) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting.append((what, future))
        self.wake()
        return await future

    @property
    def awaits_step(self) -> bool:
        """Whether a caller of `step` waits for a step that has not begun."""
        return any(number > self._num_finished and not future.done() for number, future in self._steps)

    def refuse_steps(self, reason: str) -> None:
        """Raise Unavailable with `reason` in all callers of `step`; those of a pause begin no step any more."""
        for _, future in self._steps:
            settle(future, error=Unavailable(reason))
        self._steps = []
        if self._allowed is not None:
            self._allowed = 0

    def stop(self) -> None:
        """End after the present step; the process leaves."""
        self._stop(serves_on=False)

    def finish(self) -> None:
        """End after the present step; the process goes on serving. Raises Unavailable if training has ended."""
        self._check()
        if not self.stopping.is_set():
            self._stop(serves_on=True)

    async def ended(self) -> None:
        """Wait until the run has saved and ended, or failed."""
        await self._ended.wait()

    def _stop(self, *, serves_on: bool) -> None:
        self.serves_on = serves_on
        self.stopping.set()
        self.wake()

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
                seconds = self._longest_pause if self._allowed == 0 else POLL_SECONDS
                await asyncio.wait_for(self._changed.wait(), seconds)
            await self._run_requests()
        self._is_waiting = False
        self._num_begun += 1
        if self._allowed:
            self._allowed -= 1

    async def after_last_step(self) -> None:
        """Called when the run has come to its end without an error."""

    def end(self) -> None:
        """Fail all waiting requests: no further step will come."""
        self._ended.set()
        for _, future in (*self._steps, *self._requests):
            settle(future, error=_ended())
        self._steps, self._requests = [], []

    def _check(self) -> None:
        if self.has_ended:
            raise _ended()

    def _complete_steps(self) -> None:
        for number, future in self._steps:
            if number <= self._num_finished:
                settle(future)
        self._steps = [(number, future) for number, future in self._steps if not future.done()]

    async def _run_requests(self) -> None:
        """Run all requested work in order, evaluate once for all who asked, and save once at the end."""
        while self._requests:
            work = next((work for work, _ in self._requests if work != self._save), self._save)
            futures = [future for other, future in self._requests if other == work]
            self._requests = [request for request in self._requests if request[0] != work]
            if not all(future.done() for future in futures):
                await _run(work, futures)


async def _run(work: Work, futures: Sequence[asyncio.Future[Any]]) -> None:
    result: object = None
    error: Exception | None = None
    try:
        result = await work()
    except asyncio.CancelledError:
        error = _ended()
        raise
    except Exception as failure:  # noqa: BLE001  belongs to the caller, not to the run
        error = failure
    finally:
        for future in futures:
            settle(future, result, error)


def settle(future: asyncio.Future[Any], result: object = None, error: Exception | None = None) -> None:
    """Give a future its result or its error, unless its caller has left."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _ended() -> Unavailable:
    return Unavailable("training has ended; the versions that it made are served on")
