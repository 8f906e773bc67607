"""Writes the completions of each step beside the loop: `rollouts/step_000412.safetensors` in the run folder.

The trainer drives it.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from parallm.metrics.rollout_folder import NAME, RolloutFolder, file_name
from parallm.metrics.rollout_format import StepRollouts
from parallm.metrics.rollout_writer import RolloutWriter, Throttle

FOLDER = "rollouts"
MEMORY_BYTES = 32 * 1024 * 1024
"""Bytes of the newest files that stay in memory; the newest file stays in any case."""
Encode = Callable[[StepRollouts, Callable[[], object]], bytes]
"""Returns the content of a step's file. Calls its second argument after each small part of the work."""

logger = logging.getLogger(__name__)


class RolloutFiles(RolloutWriter):
    """The files of one policy.

    At most `max_bytes` on disk: files are thinned out evenly by step. The first and the newest stay, and steps with an
    evaluation or a fault as long as others can go.
    """

    reading: RolloutFolder

    def __init__(
        self,
        folder: Path,
        encode: Encode,
        *,
        max_bytes: int,
        is_decoding: Callable[[], bool],
        evaluated: Collection[int] = (),
    ) -> None:
        """`folder` is that of the run; `is_decoding`: whether decode steps are launched, which any thread may ask;
        `evaluated`: the steps of its evaluations so far."""
        super().__init__(is_decoding)
        self._folder = folder / FOLDER
        self._encode = encode
        self._max_bytes = max_bytes
        self._kept = set(evaluated)  # the writer's
        self._newest: OrderedDict[int, bytes] = OrderedDict()
        self._newest_lock = threading.Lock()
        self._has_failed = False
        self._has_begun = False
        self._sizes: dict[int, int] | None = None  # by step, the writer's
        self.reading = RolloutFolder(self._folder, self._in_memory, lambda: self._num_dropped)

    def put(self, rollouts: StepRollouts) -> None:
        """Write these, unless `MAX_WAITING` steps wait already. What later steps an earlier process left is removed."""
        self.go_on_after(rollouts.step - 1)
        super().put(rollouts)

    def keep(self, step: int) -> None:
        """Let the file of `step` stay when others make room: it was evaluated."""
        self._do(partial(self._kept.add, step))

    def go_on_after(self, step: int) -> None:
        """Remove the files of later steps, which an interrupted run has left. Later calls do nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._do(partial(self._remove_after, step))

    def _drop(self, step: int) -> None:
        if self._num_dropped == 1:
            logger.warning(
                "step %d: its completions are not written to %s: writing takes longer than training; such steps are "
                "counted from here on (metrics.rollouts=some writes fewer)",
                step,
                self._folder,
            )

    def _in_memory(self) -> dict[int, bytes]:
        with self._newest_lock:
            return dict(self._newest)

    def _write(self, rollouts: StepRollouts, throttle: Throttle) -> None:
        content = self._encode(rollouts, throttle)
        if rollouts.is_kept:
            self._kept.add(rollouts.step)
        self._remember(rollouts.step, content)
        try:
            self._store(rollouts.step, content)
        except OSError as error:
            self._warn_once(error)

    def _store(self, step: int, content: bytes) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / file_name(step)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(content)
        temporary.replace(path)
        self._has_failed = False
        sizes = self._known_sizes()
        sizes[step] = len(content)
        self._remove(steps_to_remove(sizes, self._kept, self._max_bytes))

    def _remember(self, step: int, content: bytes) -> None:
        with self._newest_lock:
            self._newest[step] = content
            num_bytes = sum(map(len, self._newest.values()))
            while num_bytes > MEMORY_BYTES and len(self._newest) > 1:
                num_bytes -= len(self._newest.popitem(last=False)[1])

    def _remove(self, steps: Collection[int]) -> None:
        for step in steps:
            (self._folder / file_name(step)).unlink(missing_ok=True)
            self._known_sizes().pop(step, None)
            with self._newest_lock:
                self._newest.pop(step, None)

    def _remove_after(self, step: int) -> None:
        try:
            self._remove([later for later in self._known_sizes() if later > step])
        except OSError as error:
            self._warn_once(error)

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
