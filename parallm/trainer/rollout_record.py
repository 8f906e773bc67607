"""What people will look at of a step: which completions the learner keeps numbers of, and what the writer gets.

`Loop` calls it. Nothing is computed or written here.
"""

import time
from collections.abc import Sequence
from typing import Literal

from parallm.learner.learner import Learner
from parallm.metrics.rollout_folder import RolloutFolder
from parallm.metrics.rollout_format import LearnedCompletion, StepRollouts
from parallm.metrics.rollout_writer import RolloutWriter
from parallm.reports import UpdateReport
from parallm.types import Trajectory, TrajectoryGroup

MAX_SOME = 4
"""Groups of a step that `metrics.rollouts=some` keeps."""


class RolloutRecord:
    """Hands the groups of each step to the writer, with what the learner computed of them."""

    def __init__(self, writer: RolloutWriter, amount: Literal["some", "all"]) -> None:
        self._writer = writer
        self._limit = MAX_SOME if amount == "some" else None
        self._trained: list[Trajectory] = []
        self._learned: list[tuple[Trajectory, LearnedCompletion]] = []

    @property
    def reading(self) -> RolloutFolder | None:
        """The steps that are written or still in memory. For any thread. None: another process writes them."""
        return self._writer.reading

    def go_on_after(self, step: int) -> None:
        """Remove what an interrupted run has left of later steps."""
        self._writer.go_on_after(step)

    def look(self, trained: Sequence[TrajectoryGroup]) -> range:
        """The completions that the learner should keep numbers of, counted over all groups of an update.

        With `some` these are those of the first groups, which have signal.
        """
        return range(sum(len(group.trajectories) for group in trained[: self._limit]))

    def take(self, learner: Learner, trained: Sequence[TrajectoryGroup]) -> None:
        """Take what `learner` kept of the update over `trained`."""
        self._trained = [trajectory for group in trained for trajectory in group.trajectories]
        self._learned = [(trained[one.group].trajectories[one.index], one) for one in learner.take_looked()]

    def write(self, step: int, sampled: Sequence[TrajectoryGroup], update: UpdateReport | None) -> None:
        """Hand over the groups of a finished step; with `some` first those that were trained on."""
        # sources may make the groups of an update anew, but not their trajectories
        trained, learned = set(map(id, self._trained)), {id(trajectory): one for trajectory, one in self._learned}
        groups = list(sampled)
        if self._limit is not None:
            groups = sorted(groups, key=lambda group: not any(id(one) in trained for one in group.trajectories))
        groups = groups[: self._limit]
        indices = {
            id(trajectory): (number, index)
            for number, group in enumerate(groups)
            for index, trajectory in enumerate(group.trajectories)
        }
        self._writer.put(
            StepRollouts(
                step=step,
                time=time.time(),
                groups=groups,
                trained={indices[name] for name in trained if name in indices},
                learned={indices[name]: one for name, one in learned.items() if name in indices},
                is_kept=update is not None and update.fault is not None,
            )
        )
        self._trained, self._learned = [], []

    def evaluated(self, step: int) -> None:
        """The completions of this step stay longer than others."""
        self._writer.keep(step)
