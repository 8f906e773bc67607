"""Which completions of the buffer are compared with one another. Pure; used by `LiveSource`.

A recorded group becomes a group of the learner, or with `group_by=none` everything that one step trains on.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from parallm.rollout.live.records import RecordedTrajectory
from parallm.rollout.settings import RolloutSettings
from parallm.types import Problem, TrajectoryGroup

RecordedGroup = Sequence[RecordedTrajectory]
MIN_GROUP_SIZE = 2
"""Completions that a comparison needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Makes groups of completions with a reward."""

    settings: RolloutSettings

    @property
    def num_per_step(self) -> int:
        """Recorded groups with signal that a step takes."""
        return 1 if self.settings.live.group_by == "none" else self.settings.problems_per_step

    def recorded_groups(self, records: Iterable[RecordedTrajectory], now: float) -> list[RecordedGroup]:
        """Return the groups that are whole or hold a reward that has waited long enough, the oldest first."""
        by_key: dict[str, list[RecordedTrajectory]] = {}
        for record in records:
            if record.rewarded is not None:
                by_key.setdefault(self._key(record), []).append(record)
        groups = [group for rewarded in by_key.values() for group in self._cut(rewarded, now)]
        return sorted(groups, key=_oldest_reward)

    def is_enough(self, groups: Sequence[RecordedGroup], now: float) -> bool:
        """Whether a step may begin: with enough groups with signal, or with fewer if one of them has waited."""
        with_signal = [group for group in groups if has_signal(group)]
        return len(with_signal) >= self.num_per_step or any(self._has_waited(group, now) for group in with_signal)

    def take(self, groups: Sequence[RecordedGroup]) -> list[RecordedGroup]:
        """Return what one step takes: up to `num_per_step` groups with signal, and those without between them."""
        taken: list[RecordedGroup] = []
        for group in groups:
            if sum(map(has_signal, taken)) == self.num_per_step:
                break
            taken.append(group)
        return taken

    def trajectory_groups(self, group: RecordedGroup) -> list[TrajectoryGroup]:
        """Return the learner's groups, whose trajectories share one prompt: with `group_by=none` each is alone."""
        return [_trajectory_group(part) for part in self._parts(group)]

    def ids(self, group: RecordedGroup) -> list[tuple[str, ...]]:
        """Return the ids of the trajectories in each of `trajectory_groups(group)`."""
        return [tuple(record.trajectory_id for record in part) for part in self._parts(group)]

    def _parts(self, group: RecordedGroup) -> list[RecordedGroup]:
        return [[record] for record in group] if self.settings.live.group_by == "none" else [group]

    def _key(self, record: RecordedTrajectory) -> str:
        match self.settings.live.group_by:
            case "prompt":
                return record.trajectory.problem_id
            case "request":
                return record.request_id
            case "none":
                return ""

    def _size(self, record: RecordedTrajectory) -> int:
        match self.settings.live.group_by:
            case "prompt":
                return self.settings.group_size
            case "request":
                return record.num_asked
            case "none":
                return self.settings.problems_per_step * self.settings.group_size

    def _cut(self, rewarded: Sequence[RecordedTrajectory], now: float) -> Iterator[RecordedGroup]:
        size = self._size(rewarded[0])
        for begin in range(0, len(rewarded), size):
            group = rewarded[begin : begin + size]
            if len(group) == size or (len(group) >= MIN_GROUP_SIZE and self._has_waited(group, now)):
                yield group

    def _has_waited(self, group: RecordedGroup, now: float) -> bool:
        return now - _oldest_reward(group) >= self.settings.live.wait_seconds


def has_signal(group: RecordedGroup) -> bool:
    return len({record.trajectory.reward for record in group}) > 1


def _oldest_reward(group: RecordedGroup) -> float:
    return min(record.rewarded for record in group if record.rewarded is not None)


def _trajectory_group(group: RecordedGroup) -> TrajectoryGroup:
    problem = Problem(problem_id=group[0].trajectory.problem_id, messages=(), answer="")
    return TrajectoryGroup(problem=problem, trajectories=tuple(record.trajectory for record in group))
