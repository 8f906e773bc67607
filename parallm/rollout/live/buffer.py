"""The trajectories that wait for rewards, partners or a step: bounded in number and age, and kept in a file."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from parallm.errors import Unavailable, UnknownTrajectory
from parallm.reports import TrajectoryReport
from parallm.rollout.live.journal import Journal, Line, read_journal
from parallm.rollout.live.recorded import Recorded, from_values, to_values
from parallm.rollout.settings import LiveSettings

logger = logging.getLogger(__name__)

TRAINED = "trained"
"""Why trajectories have left that a step took; all other reasons are drops."""
LINES_PER_TRAJECTORY = 4
"""The file is written anew when it has as many lines as this times `max_trajectories`."""


class Buffer:
    """In the order of arrival. For the asyncio thread; `clock` tells Unix seconds."""

    def __init__(self, settings: LiveSettings, file: Path, clock: Callable[[], float] = time.time) -> None:
        """Goes on with what `file` holds."""
        self._settings = settings
        self._clock = clock
        self._kept: OrderedDict[str, Recorded] = OrderedDict()
        self._trained: OrderedDict[str, None] = OrderedDict()  # the newest ids, to tell a late reward why it is late
        self._num_collected = 0
        self._left: Counter[str] = Counter()  # by reason
        for values in read_journal(file):
            self._replay(values)
        self._journal = Journal(file)
        if file.is_file():  # its last line may be half a line
            self._write_anew()

    def __iter__(self) -> Iterator[Recorded]:
        return iter(tuple(self._kept.values()))

    def is_waiting(self, trajectory_id: str) -> bool:
        """Whether it is here and has no reward."""
        one = self._kept.get(trajectory_id)
        return one is not None and one.rewarded is None

    def add(self, one: Recorded) -> None:
        """Take one in, for which the oldest goes where there are too many, and one of the same id in any case."""
        self._num_collected += 1
        self._trained.pop(one.trajectory_id, None)
        self.remove([one.trajectory_id], "replaced")
        self._kept[one.trajectory_id] = one
        self._journal.append(partial(_added, one))
        too_many = len(self._kept) - self._settings.max_trajectories
        self.remove(list(islice(self._kept, max(0, too_many))), "full")

    def reward(self, trajectory_id: str, reward: float, parts: Mapping[str, float]) -> Recorded:
        """Set a reward; one that is there already is replaced.

        Raises UnknownTrajectory, and Unavailable for one that a step has taken.
        """
        self.expire()
        if trajectory_id in self._trained:
            raise Unavailable(f"trajectory {trajectory_id[:100]!r} was trained on already; send rewards before that")
        if trajectory_id not in self._kept:
            raise UnknownTrajectory(
                f"no trajectory {trajectory_id[:100]!r} waits for a reward: it was never collected, is older than "
                f"{self._settings.max_age_seconds:g} s (rollout.live.max_age_seconds) or was dropped"
            )
        one = self._kept[trajectory_id].with_reward(reward, parts, self._clock())
        self._kept[trajectory_id] = one
        self._journal.append(partial(_rewarded, one))
        return one

    def remove(self, ids: Collection[str], reason: str) -> None:
        """Let these go, which may be gone already."""
        found = [name for name in ids if self._kept.pop(name, None) is not None]
        if not found:
            return
        self._count_left(found, reason)
        self._journal.append(partial(_gone, found, reason))
        if self._journal.num_lines > LINES_PER_TRAJECTORY * max(self._settings.max_trajectories, len(self._kept)):
            self._write_anew()

    def refuse(self, reason: str) -> None:
        """Count a completion that cannot be trained on, whatever its reward."""
        self._num_collected += 1
        self._left[reason] += 1

    def expire(self) -> None:
        """Let those go that are too old."""
        oldest = self._clock() - self._settings.max_age_seconds
        late = []
        for one in self._kept.values():
            if one.created > oldest:
                break
            late.append(one)
        self.remove([one.trajectory_id for one in late if one.rewarded is None], "no_reward")
        self.remove([one.trajectory_id for one in late if one.rewarded is not None], "unused")

    def report(self) -> TrajectoryReport:
        self.expire()
        num_rewarded = sum(one.rewarded is not None for one in self._kept.values())
        oldest = next(iter(self._kept.values()), None)
        return TrajectoryReport(
            num_waiting=len(self._kept) - num_rewarded,
            num_rewarded=num_rewarded,
            oldest_seconds=0.0 if oldest is None else max(0.0, self._clock() - oldest.created),
            num_collected=self._num_collected,
            num_trained=self._left[TRAINED],
            dropped={reason: count for reason, count in sorted(self._left.items()) if reason != TRAINED},
        )

    def close(self) -> None:
        """Wait until the file holds everything."""
        self._journal.close()

    def _count_left(self, ids: Sequence[str], reason: str) -> None:
        self._left[reason] += len(ids)
        if reason == TRAINED:
            self._trained.update(dict.fromkeys(ids))
            while len(self._trained) > self._settings.max_trajectories:
                self._trained.popitem(last=False)

    def _write_anew(self) -> None:
        lines: list[Line] = [partial(_gone, list(self._trained), TRAINED)] if self._trained else []
        self._journal.rewrite([*lines, *(partial(_added, one) for one in self._kept.values())])

    def _replay(self, values: Mapping[str, Any]) -> None:
        """One line of the file. What it says of trajectories that are not there counts for nothing."""
        try:
            match values:
                case {"added": added}:
                    one = from_values(added)
                    self._kept[one.trajectory_id] = one
                case {"rewarded": str(name), "reward": reward, "parts": parts, "at": at}:
                    if name in self._kept:
                        self._kept[name] = self._kept[name].with_reward(reward, parts, at)
                case {"gone": gone, "reason": reason}:
                    for name in gone:
                        self._kept.pop(name, None)
                    if reason == TRAINED:
                        self._trained.update(dict.fromkeys(gone))
        except (KeyError, TypeError):
            logger.warning("a line of the trajectories' file cannot be read and is left out")


def _added(one: Recorded) -> dict[str, Any]:
    return {"added": to_values(one)}


def _rewarded(one: Recorded) -> dict[str, Any]:
    trajectory = one.trajectory
    parts = dict(trajectory.reward_parts)
    return {"rewarded": one.trajectory_id, "reward": trajectory.reward, "parts": parts, "at": one.rewarded}


def _gone(ids: Sequence[str], reason: str) -> dict[str, Any]:
    return {"gone": list(ids), "reason": reason}
