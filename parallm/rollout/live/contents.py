"""The trajectories of a buffer and what became of those that left it. Knows neither bounds nor time nor files."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from parallm.rollout.live.changes import (
    TRAINED,
    Added,
    Branched,
    Change,
    Counted,
    GivenBack,
    Left,
    Reserved,
    Rewarded,
)
from parallm.rollout.live.recorded import Recorded


@dataclass(frozen=True, slots=True)
class Departure:
    reason: str
    reward: float | None
    """The one that it was trained on with."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A trajectory that `step` learns from and that no checkpoint is known to hold."""

    one: Recorded
    step: int


class Contents:
    """Changed by `apply` only, so that the changes in a file make the same again. What does not fit is left out."""

    def __init__(self, max_departed: int) -> None:
        self._max_departed = max_departed
        self.waiting: OrderedDict[str, Recorded] = OrderedDict()
        """In the order of arrival, with a reward or without."""
        self.reserved: dict[str, Reservation] = {}
        self.departed: OrderedDict[str, Departure] = OrderedDict()
        """The newest ids that have left."""
        self.num_collected = 0
        self.num_left: Counter[str] = Counter()
        """By reason."""

    def knows(self, trajectory_id: str) -> bool:
        return any(trajectory_id in ids for ids in (self.waiting, self.reserved, self.departed))

    def apply(self, change: Change) -> None:
        match change:
            case Added(one):
                self.departed.pop(one.trajectory_id, None)
                self.waiting[one.trajectory_id] = one
                self.num_collected += 1
            case Rewarded(trajectory_id, reward, parts, at):
                if trajectory_id in self.waiting:
                    self.waiting[trajectory_id] = self.waiting[trajectory_id].with_reward(reward, parts, at)
            case Reserved(ids, step):
                found = [self.waiting.pop(name) for name in ids if name in self.waiting]
                self.reserved |= {one.trajectory_id: Reservation(one, step) for one in found}
            case GivenBack(ids, has_failed):
                self._give_back(ids, has_failed=has_failed)
            case Left(ids, reason):
                self._let_go(ids, reason)
            case Branched(version, now):
                for name, one in self.waiting.items():
                    self.waiting[name] = one.relabelled(version, now)
                for name, reservation in self.reserved.items():
                    self.reserved[name] = replace(reservation, one=reservation.one.relabelled(version, now))
            case Counted(num_collected, num_left, departed):
                self.num_collected += num_collected
                self.num_left.update(num_left)
                self.departed.update({name: Departure(reason, reward) for name, (reason, reward) in departed.items()})
            case _:
                assert_never(change)

    def changes(self) -> Iterator[Change]:
        """Those that make all of it from nothing."""
        kept = [*self.waiting.values(), *(reservation.one for reservation in self.reserved.values())]
        departed = {name: (departure.reason, departure.reward) for name, departure in self.departed.items()}
        # each of those that are kept will count as collected by itself
        yield Counted(self.num_collected - len(kept), dict(self.num_left), departed)
        yield from map(Added, kept)
        for step in sorted({reservation.step for reservation in self.reserved.values()}):
            yield Reserved(tuple(self.reserved_until(step, since=step)), step)

    def reserved_until(self, step: int, *, since: int = 0) -> list[str]:
        """Those of the steps from `since` to `step`."""
        return [name for name, reservation in self.reserved.items() if since <= reservation.step <= step]

    def _give_back(self, ids: Iterable[str], *, has_failed: bool) -> None:
        found = [self.reserved.pop(name).one for name in ids if name in self.reserved]
        for one in found:
            num_failed, num_abandoned = one.num_failed + has_failed, one.num_abandoned + (not has_failed)
            again = replace(one, num_failed=num_failed, num_abandoned=num_abandoned)
            self.waiting[one.trajectory_id] = again
        self.waiting = OrderedDict(sorted(self.waiting.items(), key=lambda item: item[1].created))

    def _let_go(self, ids: Iterable[str], reason: str) -> None:
        for name in ids:
            reservation = self.reserved.pop(name, None)
            one = self.waiting.pop(name, None) if reservation is None else reservation.one
            before = self.departed.pop(name, None)
            if one is not None:
                self.num_left[reason] += 1
            elif before is not None:
                self.num_left[before.reason] -= 1
                self.num_left[reason] += 1
            reward = one.trajectory.reward if one is not None and reason == TRAINED else None
            self.departed[name] = Departure(reason, reward)
        while len(self.departed) > self._max_departed:
            self.departed.popitem(last=False)
