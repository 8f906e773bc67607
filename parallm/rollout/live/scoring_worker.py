"""Calls of one scoring function, whose code may do anything: one that blocks or never ends delays no other.

Made by `ScoringDispatcher`.
"""

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
"""Calls at a time. One that never returns keeps its slot, so no more threads than these are ever abandoned."""
MAX_PENDING = 256
"""Calls that wait, run or are awaited; one more is refused."""
MAX_LOOPS = 2
"""Event loops for awaitables; a further one replaces one that is blocked."""
GRACE_SECONDS = 1.0
"""Time in which an event loop that is not blocked answers."""


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
        call = _Call(function, self._slots.release)
        thread = threading.Thread(target=call.run, name="scoring", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._slots.release()
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
                awaitable.close()  # else Python warns that it was never awaited
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
    """A call in a thread; `on_end` is called on the event loop, however late."""

    def __init__(self, function: Callable[[], object], on_end: Callable[[], None]) -> None:
        self._function = function
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._has_begun = False
        self._has_ended = False
        self._result = CallResult(fault=EnvironmentFault("timed_out", "interrupted"))
        self.ended: asyncio.Future[CallResult] = self._loop.create_future()

    def run(self) -> None:
        is_reported = False
        while not is_reported:
            try:
                if not self._has_begun:
                    self._has_begun = True
                    self._result = attempt(self._function)
                self._loop.call_soon_threadsafe(self._end)
                is_reported = True
            except CallTimeout:  # it comes once, at any instruction of the thread
                continue
            except RuntimeError:  # the event loop has ended
                return

    def _end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._on_end()
        if not self.ended.done():
            self.ended.set_result(self._result)


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
