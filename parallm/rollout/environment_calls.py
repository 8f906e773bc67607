"""Calls into the code of an environment, which may do anything: off the event loop, and within a time limit.

Used by `RolloutRunner` and by the scoring functions of live runs. A call returns a `CallResult` and never raises.
"""

import asyncio
import ctypes
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LATEST_INTERRUPT = 0.1
"""Seconds that a thread waits at its end for an interrupt that was sent to it."""
MAX_LINES = 40
"""Lines that are kept of a traceback: the last ones, where the error is."""


@dataclass(frozen=True, slots=True)
class EnvironmentFault:
    """Why a method of an environment returned no valid value; faults are counted by `kind`, such as `timed_out`."""

    kind: str
    detail: str
    traceback: str = ""
    """The environment's part of the traceback, if it raised."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The value that a call has returned, or its fault."""

    value: Any = None
    fault: EnvironmentFault | None = None


class CallTimeout(BaseException):
    """Raised inside a method that takes too long; a BaseException, which no `except Exception` catches."""


class EnvironmentCalls:
    """Makes one call after the other in a thread, so that HTTP is answered meanwhile; awaitables run concurrently.

    Calls that wait at the same moment share a thread, and each returns as soon as it has ended. A thread cannot be
    killed. One that exceeds its time gets an exception at its next Python instruction; one that waits outside of Python
    is abandoned.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: list[_Call] = []
        self._worker: asyncio.Task[None] | None = None

    async def call(self, function: Callable[[], object]) -> CallResult:
        """Return what `function` returns, awaited where it is awaitable; faults are `raised`, `timed_out`."""
        if inspect.iscoroutinefunction(function):  # nothing of it runs before it is awaited
            return await self._awaited(attempt(function))
        call = _Call(function)
        self._waiting.append(call)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await self._awaited(await call.result)

    async def _work(self) -> None:
        """Make the calls that wait, until none does."""
        while self._waiting:
            calls, self._waiting = self._waiting, []
            results = await call_in_thread([call.run for call in calls], self._seconds)
            for call, result in zip(calls, results, strict=False):
                if result.fault is not None:
                    call.end(result)
            self._waiting = [*calls[len(results) :], *self._waiting]

    async def _awaited(self, result: CallResult) -> CallResult:
        if not inspect.isawaitable(result.value):
            return result
        task = asyncio.ensure_future(await_result(result.value))
        try:
            # not asyncio.wait_for, whose TimeoutError looks like one that the environment raises
            done, _ = await asyncio.wait({task}, timeout=self._seconds)
            return task.result() if done else late(self._seconds)
        finally:
            task.cancel()


class _Call:
    """A function that waits for its call. A call that was cancelled meanwhile is not made."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[CallResult] = self._loop.create_future()

    def run(self) -> None:
        if not self.result.done():
            self._loop.call_soon_threadsafe(self.end, attempt(self._function))

    def end(self, result: CallResult) -> None:
        if not self.result.done():
            self.result.set_result(result)


async def call_in_thread(
    functions: Sequence[Callable[[], object]],
    seconds: float,
    *,
    name: str = "environment",
    on_end: Callable[[], None] = lambda: None,
) -> list[CallResult]:
    """Call all `functions` in a thread, or those up to the first one that takes longer than `seconds`.

    `on_end` is called on the event loop when the thread has ended, however late. Raises RuntimeError without a thread.
    """
    work = _Work(functions, on_end)
    # a daemon: a call that hangs must not hold up the end of the process
    thread = threading.Thread(target=work.run, name=name, daemon=True)
    thread.start()
    try:
        while not work.ended.done():
            index, began = work.current_call
            seconds_left = began + seconds - time.monotonic()
            if seconds_left <= 0:
                return [*work.results[:index], late(seconds)]
            await asyncio.wait({work.ended}, timeout=seconds_left)
        return work.results
    finally:
        if not work.ended.done():
            work.interrupt(thread)


class _Work:
    """Functions that one thread calls. The event loop reads `current_call` and `results` meanwhile."""

    def __init__(self, functions: Sequence[Callable[[], object]], on_end: Callable[[], None]) -> None:
        self._functions = functions
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.results: list[CallResult] = []
        self.current_call = (0, time.monotonic())  # index and begin
        self._is_interrupted = self._has_left = False

    def run(self) -> None:
        """Make the calls. An interrupt that was sent as they ended comes here, too: afterwards it would come in what
        Python does at the end of a thread, and be printed."""
        try:
            self._make_calls()
            self._has_left = True
            last = time.monotonic() + LATEST_INTERRUPT
            while self._is_interrupted and time.monotonic() < last:
                time.sleep(0.001)
        except CallTimeout:
            pass

    def interrupt(self, thread: threading.Thread) -> None:
        """Raise CallTimeout in the thread of these calls as soon as it runs Python code, unless they have ended."""
        self._is_interrupted = True  # before the test: the thread sets `_has_left`, and then reads this one
        if not self._has_left:
            interrupt(thread)

    def _make_calls(self) -> None:
        is_reported = False
        while not is_reported:
            try:
                for index, function in enumerate(self._functions):
                    self.current_call = (index, time.monotonic())
                    self.results.append(attempt(function))
                self._loop.call_soon_threadsafe(self._end)
                is_reported = True
            except CallTimeout:  # it comes once, at any instruction of the thread; nothing waits for the rest
                self._functions = ()
            except RuntimeError:  # the event loop has closed
                return

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
            self._on_end()


def late(seconds: float) -> CallResult:
    detail = f"no answer within {seconds:g} s; rollout.score_seconds is the limit"
    return CallResult(fault=EnvironmentFault("timed_out", detail))


def attempt(function: Callable[[], object]) -> CallResult:
    try:
        return CallResult(value=function())
    except CallTimeout:
        raise
    except BaseException as error:  # noqa: BLE001  sys.exit() in a score must not end the run either
        return CallResult(fault=_raised(error))


async def await_result(awaitable: Any) -> CallResult:
    try:
        return CallResult(value=await awaitable)
    except (Exception, SystemExit) as error:  # noqa: BLE001  an environment may raise anything
        return CallResult(fault=_raised(error))


def _raised(error: BaseException) -> EnvironmentFault:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    lines = "".join(traceback.format_exception(type(error), error, frames)).rstrip().splitlines()
    return EnvironmentFault("raised", _shown(error), "\n".join(lines[-MAX_LINES:]))


def _shown(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # noqa: BLE001  the class is the environment's as well
        return f"{type(error).__name__}, whose repr raises"


def interrupt(thread: threading.Thread) -> None:
    """Raise CallTimeout in `thread` as soon as it runs Python code."""
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(CallTimeout))
