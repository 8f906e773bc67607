"""Writes the completions of each step beside the loop: `rollouts/step_000412.safetensors` in the run folder.

The loop hands over what it has and goes on; a thread cuts texts, packs arrays and writes, throttled until it is late.
The trainer drives it.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallm.metrics.rollout_folder import NAME, RolloutFolder, file_name
from parallm.metrics.rollout_format import StepRollouts, encode
from parallm.metrics.token_texts import TokenTexts

FOLDER = "rollouts"
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
MEMORY_BYTES = 32 * 1024 * 1024
"""Bytes of the newest files that stay in memory; the newest file stays in any case."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Keep:
    step: int


@dataclass(frozen=True, slots=True)
class _GoOnAfter:
    step: int


_Work = StepRollouts | _Keep | _GoOnAfter


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


class RolloutFiles:
    """The files of one policy. Methods return at once; `close` waits for what is under way.

    At most `max_bytes` on disk: files are thinned out evenly by step. The first and the newest stay, and steps with an
    evaluation or a fault as long as others can go.
    """

    def __init__(
        self,
        folder: Path,
        texts: TokenTexts,
        *,
        max_bytes: int,
        is_decoding: Callable[[], bool],
        evaluated: Collection[int] = (),
    ) -> None:
        """`folder` is that of the run; `is_decoding`: whether decode steps are launched, which any thread may ask;
        `evaluated`: the steps of its evaluations so far."""
        self._folder = folder / FOLDER
        self._texts = texts
        self._max_bytes = max_bytes
        self._is_decoding = is_decoding
        self._kept = set(evaluated)  # the writer's
        self._newest: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()  # of `_newest`
        self._num_dropped = 0
        self._has_failed = False
        self._has_begun = False
        self._sizes: dict[int, int] | None = None  # by step, the writer's
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._num_waiting = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self.reading = RolloutFolder(self._folder, self._in_memory, lambda: self._num_dropped)

    @property
    def num_dropped(self) -> int:
        """Steps that were not written because the thread was behind."""
        return self._num_dropped

    def put(self, rollouts: StepRollouts) -> None:
        """Write these, unless `MAX_WAITING` steps wait already. What later steps an earlier process left is removed."""
        self.go_on_after(rollouts.step - 1)
        with self._lock:
            is_full = self._num_waiting >= MAX_WAITING
            self._num_waiting += not is_full
        if not is_full:
            self._ask(rollouts)
            return
        self._num_dropped += 1
        if self._num_dropped == 1:
            logger.warning(
                "step %d: its completions are not written to %s: writing takes longer than training; such steps are "
                "counted from here on (metrics.rollouts=some writes fewer)",
                rollouts.step,
                self._folder,
            )

    def keep(self, step: int) -> None:
        """Let the file of `step` stay when others make room: it was evaluated."""
        self._ask(_Keep(step))

    def go_on_after(self, step: int) -> None:
        """Remove the files of later steps, which an interrupted run has left. Later calls do nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._ask(_GoOnAfter(step))

    def close(self) -> None:
        """Wait until all is written. May block for the time of `MAX_WAITING` files."""
        if self._thread is not None:
            self._is_closing = True
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _ask(self, work: _Work) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _in_memory(self) -> dict[int, bytes]:
        with self._lock:
            return dict(self._newest)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                self._do(work)
            except OSError as error:
                self._warn_once(error)
            except Exception:
                logger.exception("the completions of a step could not be written")
            finally:
                if isinstance(work, StepRollouts):
                    with self._lock:
                        self._num_waiting -= 1

    def _do(self, work: _Work) -> None:
        if isinstance(work, _Keep):
            self._kept.add(work.step)
        elif isinstance(work, _GoOnAfter):
            self._remove([step for step in self._known_sizes() if step > work.step])
        else:
            self._write(work)

    def _write(self, rollouts: StepRollouts) -> None:
        throttle = Throttle(lambda: MAX_WAITING if self._is_closing else self._num_waiting - 1, self._is_decoding)
        throttle()
        content = encode(rollouts, self._texts.cut, throttle)
        if rollouts.is_kept:
            self._kept.add(rollouts.step)
        self._remember(rollouts.step, content)
        self._folder.mkdir(exist_ok=True)
        path = self._folder / file_name(rollouts.step)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(content)
        temporary.replace(path)
        self._has_failed = False
        sizes = self._known_sizes()
        sizes[rollouts.step] = len(content)
        self._remove(steps_to_remove(sizes, self._kept, self._max_bytes))

    def _remember(self, step: int, content: bytes) -> None:
        with self._lock:
            self._newest[step] = content
            num_bytes = sum(map(len, self._newest.values()))
            while num_bytes > MEMORY_BYTES and len(self._newest) > 1:
                num_bytes -= len(self._newest.popitem(last=False)[1])

    def _remove(self, steps: Collection[int]) -> None:
        for step in steps:
            (self._folder / file_name(step)).unlink(missing_ok=True)
            self._known_sizes().pop(step, None)
            with self._lock:
                self._newest.pop(step, None)

    def _known_sizes(self) -> dict[int, int]:
        """Bytes of each file, by step; read from the folder once."""
        if self._sizes is None:
            self._sizes = {}
            for path in self._folder.glob("step_*.safetensors"):
                if match := NAME.fullmatch(path.name):
                    self._sizes[int(match[1])] = path.lstat().st_size
            for path in self._folder.glob("step_*.tmp"):  # of a process that was killed
                path.unlink(missing_ok=True)
        return self._sizes

    def _warn_once(self, error: OSError) -> None:
        if not self._has_failed:
            logger.warning(
                "cannot write to %s: %s; the newest completions stay in memory", self._folder, error.strerror
            )
        self._has_failed = True


def steps_to_remove(sizes: Mapping[int, int], kept: Collection[int], max_bytes: int) -> list[int]:
    """Return the steps whose files go, so that at most `max_bytes` stay, by step as even as possible.

    The one whose neighbours are nearest to each other goes first, the oldest of these; those in `kept` after all
    others, the first and the newest never.
    """
    steps, excess = sorted(sizes), sum(sizes.values()) - max_bytes
    removed: list[int] = []
    while excess > 0 and len(steps) > 2:
        inner = range(1, len(steps) - 1)
        place = min(inner, key=lambda index: (steps[index] in kept, steps[index + 1] - steps[index - 1], index))
        excess -= sizes[steps[place]]
        removed.append(steps.pop(place))
    return removed
