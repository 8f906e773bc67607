"""Works on the completions of each step beside the loop, in a thread that is throttled until it is late.

The loop hands over what it has and goes on. `RolloutFiles` is the writer of a process that has the run folder.
"""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from parallm.metrics.rollout_folder import RolloutFolder
from parallm.metrics.rollout_format import StepRollouts

MAX_WAITING = 4
"""Steps that wait for the thread; those beyond are dropped and counted."""
MAX_WAIT, POLL = 2.0, 0.01
"""Seconds that a step's file waits while decode steps are launched, in all and at once. Python runs one thread at a
time: a writer delays the one that launches them, while an update leaves most of the time to others."""
QUIET_RATIO, LATE_RATIO, DECODING_RATIO, MAX_SLEEP = 1.0, 2.0, 5.0, 0.1
"""Seconds that the thread sleeps for each second of its own processor time: while no decode steps are launched; else if
another step waits, and if none does; and the most at once."""
MAX_LATE = 1
"""Steps that may wait until the thread sleeps no more."""

logger = logging.getLogger(__name__)


class Throttle:
    """Waits for the end of decoding before short pieces of a thread's work, and sleeps in proportion after each."""

    def __init__(self, num_waiting: Callable[[], int], is_decoding: Callable[[], bool]) -> None:
        """`num_waiting`: how many other steps wait for the thread. `is_decoding`: whether decode steps are launched."""
        self._num_waiting = num_waiting
        self._is_decoding = is_decoding
        self._left = MAX_WAIT
        self._began = time.thread_time()  # unlike wall time, it does not run while the thread waits for Python's lock

    def __call__(self) -> None:
        used = time.thread_time() - self._began
        while self._left > 0 and not self._num_waiting() and self._is_decoding():
            time.sleep(POLL)
            self._left -= POLL
        time.sleep(min(self._ratio() * used, MAX_SLEEP))
        self._began = time.thread_time()

    def _ratio(self) -> float:
        if (waiting := self._num_waiting()) > MAX_LATE:
            return 0.0
        if not self._is_decoding():
            return QUIET_RATIO
        return LATE_RATIO if waiting else DECODING_RATIO


class RolloutWriter(ABC):
    """Gets the completions of one policy. Methods return at once; `close` waits for what is under way."""

    reading: RolloutFolder | None = None
    """The files that this process writes; None: it writes none."""

    def __init__(self, is_decoding: Callable[[], bool]) -> None:
        """`is_decoding`: whether decode steps are launched, which any thread may ask."""
        self._is_decoding = is_decoding
        self._num_dropped = 0
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    @property
    def num_dropped(self) -> int:
        """Steps that were not written because the thread was behind."""
        return self._num_dropped

    def put(self, rollouts: StepRollouts) -> None:
        """Write these, unless `MAX_WAITING` steps wait already."""
        with self._lock:
            is_full = self._num_waiting >= MAX_WAITING
            self._num_waiting += not is_full
        if not is_full:
            self._do(lambda: self._write_waiting(rollouts))
            return
        self._num_dropped += 1
        self._drop(rollouts.step)

    def keep(self, step: int) -> None:  # noqa: B027  # for those that write files
        """Let what is written of `step` stay when others make room: it was evaluated."""

    def go_on_after(self, step: int) -> None:  # noqa: B027
        """Remove what an interrupted run has written of later steps."""

    def close(self) -> None:
        """Wait until all is written. May block for the time of `MAX_WAITING` steps."""
        if self._thread is not None:
            self._is_closing = True
            self._work.put(None)
            self._thread.join()
            self._thread = None

    @abstractmethod
    def _write(self, rollouts: StepRollouts, throttle: Throttle) -> None:
        """Write the completions of a step, in the thread."""

    @abstractmethod
    def _drop(self, step: int) -> None:
        """Tell of a step that is not written. Runs in the thread that calls `put`."""

    def _do(self, work: Callable[[], None]) -> None:
        """Do this in the thread, after what was asked before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("the completions of a step could not be written")

    def _write_waiting(self, rollouts: StepRollouts) -> None:
        throttle = Throttle(lambda: MAX_WAITING if self._is_closing else self._num_waiting - 1, self._is_decoding)
        throttle()
        try:
            self._write(rollouts, throttle)
        finally:
            with self._lock:
                self._num_waiting -= 1
