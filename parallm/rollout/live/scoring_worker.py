"""Calls of one scoring function, which is anybody's program: one that blocks or never ends delays no other."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from inspect import isawaitable, iscoroutine
from typing import Any

from parallm.rollout.environment_calls import (
    CallResult,
    CallTimeout,
    EnvironmentFault,
    attempt,
    await_result,
    interrupt,
)
from parallm.rollout.live.scoring_functions import ScoringFunction, ScoringInput

MAX_THREADS = 4
"""Calls at a time. One that does not come back keeps its place, so that no more threads than these are left behind."""
MAX_PENDING = 256
"""Calls under way, waiting, or awaited; one more is refused."""
MAX_LOOPS = 2
"""Event loops for awaitables, where the first one is blocked."""
GRACE_SECONDS = 1.0
"""In which an event loop that is not blocked answers."""


class ScoringWorker:
    """For the asyncio thread. Calls are made in threads, what they return is awaited in a thread of its own."""

    def __init__(self, function: ScoringFunction, seconds: float) -> None:
        """`seconds`: the longest time of a call, and of what it returns if that is awaitable."""
        self._function = function
        self._seconds = seconds
        self._places = asyncio.Semaphore(MAX_THREADS)
        self._num_pending = 0
        self._loops: list[_LoopThread] = []

    async def call(self, answered: ScoringInput, *, is_patient: bool = False) -> CallResult:
        """What the function says. Faults are `raised`, `timed_out` and `behind`: it is too slow for its calls.

        `is_patient`: wait however many others do.
        """
        if self._num_pending >= MAX_PENDING and not is_patient:
            return _behind(f"{self._num_pending} calls wait already")
        self._num_pending += 1
        try:
            outcome = await self._called(partial(self._function, answered))
            return await self._awaited(outcome.value) if isawaitable(outcome.value) else outcome
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        for loop in self._loops:
            loop.stop()

    async def _called(self, function: Callable[[], object]) -> CallResult:
        await self._places.acquire()
        call = _Call(function, self._places.release)
        thread = threading.Thread(target=call.run, name="scoring", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._places.release()
            return _behind(str(error))
        try:
            await asyncio.wait({call.ended}, timeout=self._seconds)
            return call.ended.result() if call.ended.done() else self._late()
        finally:
            if not call.ended.done():
                interrupt(thread)

    async def _awaited(self, awaitable: Any) -> CallResult:
        loop = self._free_loop()
        if loop is None:
            if iscoroutine(awaitable):
                awaitable.close()  # else Python complains that it was never awaited
            return _behind(f"{MAX_LOOPS} event loops are blocked")
        task = loop.run(awaitable)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._seconds)
            return task.result() if done else self._late()
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

    def _late(self) -> CallResult:
        detail = f"no answer within {self._seconds:g} s; rollout.score_seconds is the limit"
        return CallResult(fault=EnvironmentFault("timed_out", detail))


def _behind(detail: str) -> CallResult:
    return CallResult(fault=EnvironmentFault("behind", detail))


class _Call:
    """A call in a thread; `on_end` is called on the event loop, however late that is."""

    def __init__(self, function: Callable[[], object], on_end: Callable[[], None]) -> None:
        self._function = function
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._has_begun = False
        self._has_ended = False
        self._outcome = CallResult(fault=EnvironmentFault("timed_out", "interrupted"))
        self.ended: asyncio.Future[CallResult] = self._loop.create_future()

    def run(self) -> None:
        is_told = False
        while not is_told:
            try:
                if not self._has_begun:
                    self._has_begun = True
                    self._outcome = attempt(self._function)
                self._loop.call_soon_threadsafe(self._end)
                is_told = True
            except CallTimeout:  # it comes once, wherever the thread is
                continue
            except RuntimeError:  # the event loop has ended
                return

    def _end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._on_end()
        if not self.ended.done():
            self.ended.set_result(self._outcome)


class _LoopThread:
    """An event loop of its own. What blocks it holds up what else is awaited there, and nothing besides."""

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
        """After something was late: interrupt what blocks the loop, if something does."""
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
            with suppress(CallTimeout):  # what it was meant for has just ended by itself
                self._loop.run_forever()
        self._loop.close()
