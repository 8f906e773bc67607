"""Rewards by the scoring functions that clients have named, computed off the event loop. Used by `LiveSource`.

The code of a function may do anything: one that blocks or never ends delays no other.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from inspect import isawaitable, iscoroutine
from typing import Any

from parallm.errors import InvalidRequest
from parallm.rollout.environment_calls import (
    CallResult,
    CallTimeout,
    EnvironmentFault,
    await_result,
    call_in_thread,
    interrupt,
    late,
)
from parallm.rollout.live.records import RecordedTrajectory
from parallm.rollout.live.scoring_functions import (
    EnvironmentScoring,
    ScoringFunction,
    ScoringInput,
    load_scoring_functions,
    shipped_scoring_functions,
)
from parallm.rollout.scoring import SCALAR_REWARD, read_parts

MAX_THREADS = 4
"""Calls at a time. One that never returns keeps its slot, so no more threads than these are ever abandoned."""
MAX_PENDING = 256
"""Calls that wait, run or are awaited; one more is refused."""
MAX_LOOPS = 2
"""Event loops for awaitables; a further one replaces one that is blocked."""
GRACE_SECONDS = 1.0
"""Time in which an event loop that is not blocked answers."""

logger = logging.getLogger(__name__)

OnParts = Callable[[RecordedTrajectory, Mapping[str, float]], EnvironmentFault | None]
"""Takes the parts of a reward; returns a fault if they cannot be one."""


class ScoringDispatcher:
    """Calls a trajectory's scoring function once, if it has one, and reports the result. Used on the asyncio thread.

    `on_parts` gets the parts of a reward, `on_fault` a trajectory without one and the kind of fault.
    """

    def __init__(
        self,
        targets: Mapping[str, str],
        seconds: float,
        on_parts: OnParts,
        on_fault: Callable[[RecordedTrajectory, str], None],
    ) -> None:
        """`targets` name functions beside those of ParaLLM's environments, and win over these.

        Raises ConfigError for a function that is not there.
        """
        self._seconds = seconds
        self._configured = load_scoring_functions(targets)
        self._functions: dict[str, ScoringFunction] = {**shipped_scoring_functions(), **self._configured}
        self._workers: dict[str, ScoringWorker] = {}
        self._on_parts = on_parts
        self._on_fault = on_fault
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_faults: Counter[tuple[str, str]] = Counter()  # by function and kind

    def check(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for a function that is not there, or that could not use the metadata."""
        if name not in self._functions:
            names = ", ".join(sorted(self._functions))
            raise InvalidRequest(f"no scoring_function {name[:50]!r}; there are {names}", "scoring_function")
        function = self._functions[name]
        if isinstance(function, EnvironmentScoring):
            function.answer(metadata)

    def connect(self, decode: Callable[[Sequence[int]], str], scores: Mapping[str, EnvironmentScoring]) -> None:
        """Begin to call functions; `decode` makes prompts of tokens.

        `scores` are those of the run's environment. Functions that the configuration names win.
        """
        self._functions |= {**scores, **self._configured}
        self._decode = decode

    def begin(self, record: RecordedTrajectory, *, is_patient: bool = False) -> None:
        """Call the function of a trajectory without a reward, once `connect` was called.

        It is a fault if too many calls wait already, unless `is_patient`.
        """
        name = record.scoring_function
        if name is not None and record.rewarded is None and self._decode is not None:
            prompt = self._decode(record.trajectory.prompt_tokens)
            task = asyncio.create_task(self._score(record, name, prompt, is_patient=is_patient))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @property
    def is_scoring(self) -> bool:
        """Whether a scoring function is at work on a trajectory."""
        return bool(self._tasks)

    async def close(self) -> None:
        """Cancel the calls under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers.values():
            worker.close()

    async def _score(self, record: RecordedTrajectory, name: str, prompt: str, *, is_patient: bool) -> None:
        parts: dict[str, float] = {}
        result = await self._call(record, name, prompt, is_patient=is_patient)
        if result.fault is None and result.value is None:
            return  # the function leaves the reward to the client
        value = {SCALAR_REWARD: result.value} if isinstance(result.value, int | float) else result.value
        fault = result.fault or read_parts(value, parts) or self._on_parts(record, parts)
        if fault is not None:
            self._log(name, fault)
            self._on_fault(record, fault.kind)

    async def _call(self, record: RecordedTrajectory, name: str, prompt: str, *, is_patient: bool) -> CallResult:
        if name not in self._functions:  # in a file that another configuration has left
            return CallResult(fault=EnvironmentFault("missing", ""))
        scoring_input = ScoringInput(
            prompt=prompt,
            text=record.trajectory.text,
            finish_reason=record.trajectory.finish_reason,
            metadata=record.metadata,
        )
        if name not in self._workers:
            self._workers[name] = ScoringWorker(self._functions[name], self._seconds)
        return await self._workers[name].call(scoring_input, is_patient=is_patient)

    def _log(self, name: str, fault: EnvironmentFault) -> None:
        """Log a fault the 1st, 2nd, 4th, 8th time and so on, without an exception's text, which may quote metadata."""
        exception = fault.detail.partition("(")[0] if fault.kind == "raised" else ""
        self._num_faults[name, fault.kind] += 1
        count = self._num_faults[name, fault.kind]
        if count & (count - 1) == 0:
            logger.warning(
                "scoring function %s: %s %s; it has cost %d trajectories", name, fault.kind, exception, count
            )


class ScoringWorker:
    """Calls the function in threads, and awaits what it returns in a thread of its own. Used on the asyncio thread."""

    def __init__(self, function: ScoringFunction, seconds: float) -> None:
        """`seconds` is the longest time of a call, and of the awaitable that it may return."""
        self._function = function
        self._seconds = seconds
        self._slots = asyncio.Semaphore(MAX_THREADS)
        self._num_pending = 0
        self._loops: list[_LoopThread] = []

    async def call(self, scoring_input: ScoringInput, *, is_patient: bool = False) -> CallResult:
        """Call the function. Faults are `raised`, `timed_out`, and `behind`: it is too slow for its calls.

        With `is_patient` the call waits for any number of others.
        """
        if self._num_pending >= MAX_PENDING and not is_patient:
            return _behind(f"{self._num_pending} calls wait already")
        self._num_pending += 1
        try:
            result = await self._called(partial(self._function, scoring_input))
            return await self._awaited(result.value) if isawaitable(result.value) else result
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        for loop in self._loops:
            loop.stop()

    async def _called(self, function: Callable[[], object]) -> CallResult:
        await self._slots.acquire()
        try:
            (result,) = await call_in_thread([function], self._seconds, name="scoring", on_end=self._slots.release)
        except RuntimeError as error:
            self._slots.release()
            return _behind(str(error))
        return result

    async def _awaited(self, awaitable: Any) -> CallResult:
        loop = self._free_loop()
        if loop is None:
            if iscoroutine(awaitable):
                awaitable.close()  # else Python warns that it was never awaited
            return _behind(f"{MAX_LOOPS} event loops are blocked")
        task = loop.run(awaitable)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._seconds)
            return task.result() if done else late(self._seconds)
        finally:
            if not task.done():
                task.cancel()
                await loop.free()

    def _free_loop(self) -> "_LoopThread | None":
        free = next((loop for loop in self._loops if not loop.is_blocked), None)
        if free is None and len(self._loops) < MAX_LOOPS:
            free = _LoopThread()
            self._loops.append(free)
        return free


def _behind(detail: str) -> CallResult:
    return CallResult(fault=EnvironmentFault("behind", detail))


class _LoopThread:
    """An event loop in a thread of its own. Code that blocks it delays only what else is awaited there."""

    def __init__(self) -> None:
        self.is_blocked = False
        self._is_asked = False
        self._has_stopped = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="scoring-loop", daemon=True)
        self._thread.start()

    def run(self, awaitable: Any) -> asyncio.Future[CallResult]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(await_result(awaitable), self._loop))

    async def free(self) -> None:
        """Interrupt what blocks the loop, if anything does. Called after something was late."""
        if self._is_asked:
            return
        self._is_asked = True
        answered: Future[None] = Future()
        answer = asyncio.wrap_future(answered)
        answer.add_done_callback(self._answered)
        self._loop.call_soon_threadsafe(answered.set_result, None)
        done, _ = await asyncio.wait({answer}, timeout=GRACE_SECONDS)
        if not done:
            self.is_blocked = True
            interrupt(self._thread)

    def stop(self) -> None:
        self._has_stopped = True
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    def _answered(self, _: asyncio.Future[None]) -> None:
        self.is_blocked = self._is_asked = False

    def _run(self) -> None:
        while not self._has_stopped:
            with suppress(CallTimeout):  # the call that it was meant for has just ended by itself
                self._loop.run_forever()
        self._loop.close()
