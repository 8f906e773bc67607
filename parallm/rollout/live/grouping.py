"""Which completions of the buffer are compared with one another. Pure.

A pile is a group, or with `group_by=none` everything that one step trains on.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from parallm.rollout.live.records import RecordedTrajectory
from parallm.rollout.settings import RolloutSettings
from parallm.types import Problem, TrajectoryGroup

RecordedGroup = Sequence[RecordedTrajectory]
MIN_GROUP_SIZE = 2
"""One completion alone has nothing to be compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """How completions become piles."""

    settings: RolloutSettings

    @property
    def wanted(self) -> int:
        """Piles with signal that a step takes."""
        return 1 if self.settings.live.group_by == "none" else self.settings.problems_per_step

    def piles(self, kept: Iterable[RecordedTrajectory], now: float) -> list[RecordedGroup]:
        """Those that are whole, and those of which a reward has waited long enough; the oldest first."""
        by_key: dict[str, list[RecordedTrajectory]] = {}
        for one in kept:
            if one.rewarded is not None:
                by_key.setdefault(self._key(one), []).append(one)
        found = [pile for rewarded in by_key.values() for pile in self._cut(rewarded, now)]
        return sorted(found, key=_oldest_reward)

    def is_enough(self, piles: Sequence[RecordedGroup], now: float) -> bool:
        """Whether a step may begin: with enough piles with signal, or with fewer of which one has waited."""
        good = [pile for pile in piles if has_signal(pile)]
        return len(good) >= self.wanted or any(self._has_waited(pile, now) for pile in good)

    def first(self, piles: Sequence[RecordedGroup]) -> list[RecordedGroup]:
        """What one step takes: up to as many with signal as it wants, and those without between them."""
        taken: list[RecordedGroup] = []
        for pile in piles:
            if sum(map(has_signal, taken)) == self.wanted:
                break
            taken.append(pile)
        return taken

    def groups(self, pile: RecordedGroup) -> list[TrajectoryGroup]:
        """As the learner takes it, which computes a group's prompt once: completions of different ones are alone."""
        if self.settings.live.group_by == "none":
            return [_group([one]) for one in pile]
        return [_group(pile)]

    def ids(self, pile: RecordedGroup) -> list[tuple[str, ...]]:
        """Of the trajectories in each of `groups(pile)`."""
        names = [one.trajectory_id for one in pile]
        return [(name,) for name in names] if self.settings.live.group_by == "none" else [tuple(names)]

    def _key(self, one: RecordedTrajectory) -> str:
        match self.settings.live.group_by:
            case "prompt":
                return one.trajectory.problem_id
            case "request":
                return one.request_id
            case "none":
                return ""

    def _size(self, one: RecordedTrajectory) -> int:
        match self.settings.live.group_by:
            case "prompt":
                return self.settings.group_size
            case "request":
                return one.num_asked
            case "none":
                return self.settings.problems_per_step * self.settings.group_size

    def _cut(self, rewarded: Sequence[RecordedTrajectory], now: float) -> Iterator[RecordedGroup]:
        size = self._size(rewarded[0])
        for begin in range(0, len(rewarded), size):
            pile = rewarded[begin : begin + size]
            if len(pile) == size or (len(pile) >= MIN_GROUP_SIZE and self._has_waited(pile, now)):
                yield pile

    def _has_waited(self, pile: RecordedGroup, now: float) -> bool:
        return now - _oldest_reward(pile) >= self.settings.live.wait_seconds


def has_signal(pile: RecordedGroup) -> bool:
    return len({one.trajectory.reward for one in pile}) > 1


def _oldest_reward(pile: RecordedGroup) -> float:
    return min(one.rewarded for one in pile if one.rewarded is not None)


def _group(pile: RecordedGroup) -> TrajectoryGroup:
    problem = Problem(problem_id=pile[0].trajectory.problem_id, messages=(), answer="")
    return TrajectoryGroup(problem=problem, trajectories=tuple(one.trajectory for one in pile))
