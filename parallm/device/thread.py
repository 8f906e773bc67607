"""The one thread that evaluates MLX arrays: queued calls first, then the unit of work that the governor picks."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import mlx.core as mx

from parallm.device.engines import Engines, Worker
from parallm.device.governor import Governor, Work
from parallm.device.load_mlx import first_use
from parallm.device.spans import Spans
from parallm.errors import EngineStopped
from parallm.types import TrafficClass

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
TRAFFIC: tuple[TrafficClass, ...] = ("serving", "rollout")
QUIET_SECONDS = 0.25
"""Time without work after which engines prepare what they may need."""
ENDED = "the device thread has ended; restart the process"


def run_until_it_waits() -> None:
    """Let this thread, and those that it starts from now on, keep a core until it waits: Linux's policy for batches.

    On a CPU each operation wakes a thread of MLX, which would interrupt the one that goes on to the next operation,
    thousands of times a second with a small model. Threads of the usual policy, such as the one that answers requests,
    still interrupt it. A policy that a user has chosen stays.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class DeviceThread:
    """Owner of the thread. Any thread may use `call`, `iterate`, `score`, `encode` and `load`; their work runs on the
    device thread.

    Loop contract: consumes queued calls, engine units and learner units / waits for the condition when there are none /
    produces results in futures / ends with `stop`.
    """

    def __init__(self, governor: Governor) -> None:
        self.governor = governor
        self.spans = Spans()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._updates: deque[_Job] = deque()
        self._scorings: deque[_Job] = deque()
        self._encodings: deque[_Job] = deque()
        self._loads: deque[_Job] = deque()
        self._worker: Worker | None = None
        self._unflushed: TrafficClass | None = None  # class whose last step may still be on the device
        self._stopping = False
        self._busy_until = 0.0
        self._wakeup = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="device", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def is_serving(self) -> bool:
        """Whether requests of clients run or wait."""
        return self._worker is not None and self._worker.has_work("serving")

    @property
    def is_decoding(self) -> bool:
        """Whether decode steps are launched: there are requests, and no update computes. An update computes from the
        end of its first unit on, unless it is parked. Any thread may ask."""
        with suppress(IndexError):  # there is no update, or it ends meanwhile
            update = self._updates[0]
            if update.has_begun and not update.is_parked:
                return False
        return self._worker is not None and any(map(self._worker.has_work, TRAFFIC))

    def attach(self, worker: Worker) -> None:
        """Step this engine whenever it has work. While there is another one, only the device thread may attach."""
        if self._worker is None:
            self._worker = worker
        elif isinstance(self._worker, Engines):
            self._worker.engines.append(worker)
        else:
            self._worker = Engines([self._worker, worker])
        self.wake()

    def detach(self, worker: Worker) -> None:
        """Forget one of several engines, which has no work. For the device thread."""
        assert isinstance(self._worker, Engines), "the first engine stays"
        self._flush()
        self._worker.remove(worker)
        if len(self._worker.engines) == 1:
            self._worker = self._worker.engines[0]

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run `function` between two units of work. Raises EngineStopped after `stop`."""
        future: Future[Result] = Future()
        with self._running():
            self._calls.append((function, future))
        return future

    def iterate(self, units: Iterator[Result | Future[Any]]) -> Future[Result]:
        """Run a learner update unit by unit; the future gets the last value of the iterator.

        A unit may yield a future: the update is then parked, and other work runs, until that future is done. Updates
        run one after the other, in the order of the calls. A begun update cannot be cancelled.
        """
        return self._queue(self._updates, _Job(units, is_cancellable=False, on_resume=self.wake))

    def score(self, units: Iterator[Result]) -> Future[Result]:
        """Score completions unit by unit; the future gets the last value of the iterator.

        The units count as rollouts and run before sampling of rollouts.
        """
        return self._queue(self._scorings, _Job(units, is_cancellable=True))

    def encode(self, units: Iterator[Result]) -> Future[Result]:
        """Compute vectors unit by unit; the future gets the last value of the iterator.

        The units are a class of their own. Requests take turns, so that a short one does not wait for a long one.
        """
        return self._queue(self._encodings, _Job(units, is_cancellable=True))

    def load(self, units: Iterator[Result]) -> Future[Result]:
        """Load a model unit by unit, a class of its own; the future gets the last value of the iterator.

        A begun load cannot be cancelled.
        """
        return self._queue(self._loads, _Job(units, is_cancellable=False))

    def wake(self) -> None:
        """Look for work again, after a change outside of the queue."""
        with self._wakeup:
            self._wakeup.notify()

    def stop(self) -> None:
        """End the loop after the present unit and fail all queued work. Safe to call twice."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Hold the lock to queue work, and wake the thread. Raises EngineStopped after its end."""
        with self._wakeup:
            if not self.is_alive:
                raise EngineStopped(ENDED)
            yield
            self._wakeup.notify()

    def _queue(self, jobs: "deque[_Job]", job: "_Job") -> Future[Any]:
        with self._running():
            jobs.append(job)
        return job.future

    def _loop(self) -> None:
        try:
            if (use := first_use()) is not None:
                use.join()
            if mx.default_device() == mx.Device(mx.cpu):
                run_until_it_waits()
            while not self._stopping:
                self._run_calls()
                ready = self._ready()
                if ready:
                    self._run_unit(self.governor.choose(ready))
                    self._busy_until = time.perf_counter()
                elif not self._prepare():
                    self._wait()
        finally:
            self._fail_rest()
            mx.clear_streams()  # otherwise MLX may abort the process at its end

    def _prepare(self) -> bool:
        """Let the engine prepare something, after some time without work: in the short pauses of a run, the next unit
        would have to wait for it."""
        is_quiet = time.perf_counter() - self._busy_until >= QUIET_SECONDS
        return is_quiet and self._worker is not None and self._worker.prepare()

    def _wait(self) -> None:
        with self._wakeup:
            if not self._calls and not self._stopping and not self._ready():
                self._wakeup.wait(timeout=QUIET_SECONDS)

    def _run_calls(self) -> None:
        while self._calls and not self._stopping:
            function, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                _complete(future, function)
                self._busy_until = time.perf_counter()

    def _ready(self) -> list[Work]:
        ready: list[Work] = []
        if self._worker is not None:
            ready += [traffic for traffic in TRAFFIC if self._worker.has_work(traffic)]
        if self._scorings and "rollout" not in ready:
            ready.append("rollout")
        if self._encodings:
            ready.append("encoding")
        if self._loads:
            ready.append("loading")
        if self._updates and not self._updates[0].is_parked:
            ready.append("learning")
        return ready

    def _run_unit(self, work: Work) -> None:
        if work == "learning":
            self._flush()
            self._run_job(work, self._updates)
        elif work == "encoding":
            self._flush()
            self._run_job(work, self._encodings)
            self._encodings.rotate(-1)
        elif work == "loading":
            self._flush()
            self._run_job(work, self._loads)
        elif work == "rollout" and self._scorings:
            self._flush()
            self._run_job(work, self._scorings)
        elif self._worker is not None:
            if work != self._unflushed:
                self._flush()
            self._unflushed = work
            self._run_worker(work, self._worker.step)

    def _flush(self) -> None:
        """Finish the step in flight before other work begins, so that its seconds count for its own class."""
        if self._worker is not None and self._unflushed is not None:
            self._run_worker(self._unflushed, self._worker.flush, is_flush=True)
        self._unflushed = None

    def _run_worker(
        self, traffic: TrafficClass, unit: Callable[[TrafficClass], None], *, is_flush: bool = False
    ) -> None:
        with self._charged(traffic, is_flush=is_flush):
            try:
                unit(traffic)
            except Exception as error:  # the one broad except: the requests of this unit fail and the loop continues
                logger.exception("a %s step failed", traffic)
                assert self._worker is not None
                self._worker.fail(traffic, error)

    @contextmanager
    def _charged(self, work: Work, *, is_flush: bool = False) -> Iterator[None]:
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        self.governor.charge(work, end - start, is_flush=is_flush)
        self.spans.units.append((work, start, end))

    def _run_job(self, work: Work, jobs: "deque[_Job]") -> None:
        with self._charged(work):
            if jobs[0].run_unit():
                jobs.popleft()

    def _fail_rest(self) -> None:
        """Fail all waiting work, however the thread ended."""
        error = EngineStopped(ENDED)
        with self._wakeup:
            self._stopping = True
        jobs = (*self._updates, *self._scorings, *self._encodings, *self._loads)
        waiting = [future for _, future in self._calls] + [job.future for job in jobs]
        for queue in (self._calls, self._updates, self._scorings, self._encodings, self._loads):
            queue.clear()
        for future in waiting:
            with suppress(InvalidStateError):  # who waited may have cancelled it, also in this moment
                future.set_exception(error)
        if self._worker is not None:
            for traffic in TRAFFIC:
                self._worker.fail(traffic, error)


def _complete(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        result = function()
    except Exception as error:  # noqa: BLE001  # raised where the future is awaited
        future.set_exception(error)
    else:
        future.set_result(result)


class _Job:
    """An iterator that the device thread runs unit by unit. Its future gets the last value."""

    def __init__(
        self, units: Iterator[Any], *, is_cancellable: bool, on_resume: Callable[[], None] = lambda: None
    ) -> None:
        """`on_resume` is called from any thread when the job is parked no more."""
        self.future: Future[Any] = Future()
        self._units = units
        self._is_cancellable = is_cancellable
        self._on_resume = on_resume
        self._awaited: Future[Any] | None = None
        self._last: Any = None
        self.has_begun = False
        """Whether a unit has ended."""

    @property
    def is_parked(self) -> bool:
        """Whether the job waits for a future that its last unit has yielded. Any thread may ask."""
        awaited = self._awaited
        return awaited is not None and not awaited.done()

    def run_unit(self) -> bool:
        """Run the next unit. Return whether the job has ended."""
        if self.future.cancelled():
            return True
        if not self._is_cancellable and not self.future.running() and not self.future.set_running_or_notify_cancel():
            return True
        self._awaited = None  # it may hold the last one's result
        try:
            value = next(self._units)
        except StopIteration:
            self._end(self._last, None)
        except Exception as error:  # noqa: BLE001  # raised where the future is awaited
            self._end(None, error)
        else:
            self._keep(value)
            self.has_begun = True
            return False
        return True

    def _keep(self, value: object) -> None:
        if not isinstance(value, Future):
            self._last = value
            return
        self._awaited = value
        value.add_done_callback(lambda _: self._on_resume())

    def _end(self, result: object, error: Exception | None) -> None:
        if not self.future.running() and not self.future.set_running_or_notify_cancel():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)
