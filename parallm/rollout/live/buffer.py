"""Trajectories that wait for rewards, partners, a step or a checkpoint: bounded in number, and kept in a file.

Used by `LiveSource`. Every change is applied to `BufferState` and appended to the file, from which a run resumes.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from parallm.errors import NotStored, Unavailable, UnknownTrajectory
from parallm.reports import TrajectoryReport
from parallm.rollout.live.journal import Journal, read_journal
from parallm.rollout.live.records import RecordedTrajectory, read_record, to_json
from parallm.rollout.settings import LiveSettings
from parallm.types import RecentTrajectory, TrajectoryState

Change: TypeAlias = Mapping[str, Any]
"""A line of the file; `BufferState.apply` knows its forms."""
TRAINED = "trained"
"""Reason of trajectories that left because a checkpoint has learned from them; all other reasons are drops."""
LINES_PER_TRAJECTORY = 4
"""The file is written anew when its lines exceed this number times `max_trajectories`."""
MAX_FAILED = 3
"""Faulty steps after which a trajectory that was in all of them leaves, even if no fault has named it."""
MAX_ABANDONED = 20
"""Ends of the process within a step after which a trajectory leaves: far more than chance brings, in case that the
trajectory is their cause."""

logger = logging.getLogger(__name__)


class Departure(NamedTuple):
    """A trajectory that has left."""

    reason: str
    reward: float | None
    """The reward that it was trained on with."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A trajectory that `step` learns from and that no checkpoint is known to hold."""

    record: RecordedTrajectory
    step: int


class BufferState:
    """The trajectories of a buffer and what became of those that left. Knows neither bounds nor time nor files.

    Only `apply` changes it, so the changes in a file make the same state again. A change that does not fit is ignored.
    """

    def __init__(self, max_departed: int) -> None:
        self._max_departed = max_departed
        self.waiting: OrderedDict[str, RecordedTrajectory] = OrderedDict()
        """Records in the order of arrival, with a reward or without."""
        self.reserved: dict[str, Reservation] = {}
        self.departed: OrderedDict[str, Departure] = OrderedDict()
        """The newest ids that have left."""
        self.num_collected = 0
        self.num_left: Counter[str] = Counter()
        """Trajectories that have left, by reason."""
        self.newest = 0.0
        """Time of the newest record or reward."""

    def knows(self, trajectory_id: str) -> bool:
        return any(trajectory_id in ids for ids in (self.waiting, self.reserved, self.departed))

    def apply(self, change: Change) -> None:
        """Raises KeyError, TypeError or ValueError for a line of no known form, which changes nothing."""
        match change:
            case {"added": added}:
                record = added if isinstance(added, RecordedTrajectory) else read_record(added)
                self.departed.pop(record.trajectory_id, None)
                self.waiting[record.trajectory_id] = record
                self.num_collected += 1
                self.newest = max(self.newest, record.created, record.rewarded or 0.0)
            case {"rewarded": str(name), "reward": int() | float() as reward, "parts": dict(parts), "at": float(at)}:
                if name in self.waiting:
                    self.waiting[name] = self.waiting[name].with_reward(reward, parts, at)
                self.newest = max(self.newest, at)
            case {"reserved": [*ids], "step": int(step)}:  # a step learns from these: its own until a checkpoint has it
                records = [self.waiting.pop(name) for name in ids if name in self.waiting]
                self.reserved |= {record.trajectory_id: Reservation(record, step) for record in records}
            case {"given_back": [*ids], "failed": bool(has_failed)}:  # no version that is left has learned from these
                self._requeue(ids, has_failed=has_failed)
            case {"gone": [*ids], "reason": str(reason)}:
                self._remove(ids, reason)
            case {"branched": int(version), "now": int(now)}:  # see `RecordedTrajectory.relabelled`
                for name, record in self.waiting.items():
                    self.waiting[name] = record.relabelled(version, now)
                for name, reservation in self.reserved.items():
                    self.reserved[name] = replace(reservation, record=reservation.record.relabelled(version, now))
            case {"collected": int(num_collected), "left": dict(num_left), "departed": dict(departed)}:
                left = {name: Departure(*departure) for name, departure in departed.items()}
                self.num_collected += num_collected
                self.num_left.update(num_left)
                self.departed.update(left)
            case _:
                raise ValueError("a change of no known form")

    def changes(self) -> Iterator[Change]:
        """Return the changes that make this state from nothing."""
        records = [*self.waiting.values(), *(reservation.record for reservation in self.reserved.values())]
        # each of the records will count as collected when it is added
        num_collected = self.num_collected - len(records)
        yield {"collected": num_collected, "left": dict(self.num_left), "departed": dict(self.departed)}
        yield from ({"added": record} for record in records)
        for step in sorted({reservation.step for reservation in self.reserved.values()}):
            yield {"reserved": self.reserved_until(step, since=step), "step": step}

    def reserved_until(self, step: int, *, since: int = 0) -> list[str]:
        """Return the ids that the steps from `since` to `step` have reserved."""
        return [name for name, reservation in self.reserved.items() if since <= reservation.step <= step]

    def _requeue(self, ids: Iterable[str], *, has_failed: bool) -> None:
        records = [self.reserved.pop(name).record for name in ids if name in self.reserved]
        for record in records:
            num_failed, num_abandoned = record.num_failed + has_failed, record.num_abandoned + (not has_failed)
            self.waiting[record.trajectory_id] = replace(record, num_failed=num_failed, num_abandoned=num_abandoned)
        self.waiting = OrderedDict(sorted(self.waiting.items(), key=lambda item: item[1].created))

    def _remove(self, ids: Iterable[str], reason: str) -> None:
        for name in ids:
            reservation = self.reserved.pop(name, None)
            record = self.waiting.pop(name, None) if reservation is None else reservation.record
            before = self.departed.pop(name, None)
            if record is not None:
                self.num_left[reason] += 1
            elif before is not None:
                self.num_left[before.reason] -= 1
                self.num_left[reason] += 1
            reward = record.trajectory.reward if record is not None and reason == TRAINED else None
            self.departed[name] = Departure(reason, reward)
        while len(self.departed) > self._max_departed:
            self.departed.popitem(last=False)


class TrajectoryBuffer:
    """Trajectories wait, are reserved by a step, and leave when a checkpoint holds that step.

    Used on the asyncio thread. Ages count while a process of the run lives, by a clock that never jumps, so neither a
    change of the system's clock nor the time between two processes makes anything older.
    """

    def __init__(self, settings: LiveSettings, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Resume from `file`. `clock` returns seconds that only grow."""
        self._settings = settings
        self._state = BufferState(settings.max_trajectories)
        self._read(file)
        self._now_less_clock = (self._state.newest or time.time()) - clock()
        self._clock = clock
        self._journal = Journal(file, to_json)
        if file.is_file():
            self._write_anew()

    def __iter__(self) -> Iterator[RecordedTrajectory]:
        return iter(tuple(self._state.waiting.values()))

    @property
    def now(self) -> float:
        """Seconds of the run; see `RecordedTrajectory.created`."""
        return self._clock() + self._now_less_clock

    def is_waiting(self, trajectory_id: str) -> bool:
        """Whether the trajectory is here and has no reward."""
        record = self._state.waiting.get(trajectory_id)
        return record is not None and record.rewarded is None

    def knows(self, trajectory_id: str) -> bool:
        """Whether the trajectory is here, or among the newest that have left."""
        return self._state.knows(trajectory_id)

    def add(self, record: RecordedTrajectory) -> bool:
        """Add a record; return False if its id is known already.

        If there are too many, the oldest without a reward leaves, or the oldest of all if each has one.
        """
        if self.knows(record.trajectory_id):
            self.refuse("id_in_use")
            return False
        self._change({"added": record})
        surplus = len(self._state.waiting) - self._settings.max_trajectories
        self.remove(self._least_wanted(surplus) if surplus > 0 else (), "full")
        return True

    def reward(self, trajectory_id: str, reward: float, parts: Mapping[str, float]) -> None:
        """Set or replace a reward. One that a step has taken may come again unchanged.

        Raises UnknownTrajectory, and Unavailable for another reward than the one that a step has taken.
        """
        self.expire()
        if trajectory_id in self._state.waiting:
            self._change({"rewarded": trajectory_id, "reward": reward, "parts": dict(parts), "at": self.now})
        else:
            self._check_repeated(trajectory_id, reward)

    def reserve(self, ids: Collection[str], step: int) -> None:
        """Reserve these for `step`: they neither wait nor take rewards any more."""
        self._change({"reserved": tuple(ids), "step": step})
        surplus = len(self._state.reserved) - self._settings.max_trajectories
        if surplus > 0:
            logger.warning(
                "%d trajectories count as trained on though no checkpoint holds their steps: more than "
                "rollout.live.max_trajectories=%d wait for one; lower checkpoint.every",
                surplus,
                self._settings.max_trajectories,
            )
            self.remove(list(islice(self._state.reserved, surplus)), TRAINED)

    def saved(self, step: int) -> None:
        """Remove what the steps up to `step` have learned from, which a checkpoint holds."""
        self.remove(self._state.reserved_until(step), TRAINED)

    def failed(self, step: int, culprits: Collection[str]) -> None:
        """Remove the culprits of a fault that left `step` without effect; the others wait again, up to a bound."""
        for name in self._state.reserved_until(step, since=step):
            if name in culprits or self._state.reserved[name].record.num_failed + 1 >= MAX_FAILED:
                self.remove([name], "fault")
        self._requeue(self._state.reserved_until(step, since=step), has_failed=True)

    def resume(self, step: int) -> int:
        """Resume after `step`: what later steps had reserved waits again. Return the number of these."""
        self.saved(step)
        abandoned = self._state.reserved
        suspects = [name for name, entry in abandoned.items() if entry.record.num_abandoned + 1 >= MAX_ABANDONED]
        if suspects:
            logger.warning(
                "%d trajectories are dropped: %d processes have ended within a step on them",
                len(suspects),
                MAX_ABANDONED,
            )
            self.remove(suspects, "fault")
        num_abandoned = len(abandoned)
        self._requeue(list(abandoned), has_failed=False)
        return num_abandoned

    def branch(self, version: int, now: int) -> None:
        """Relabel everything after the learner has gone back to the weights of `version`, which it calls `now`."""
        if self._state.waiting or self._state.reserved:
            self._change({"branched": version, "now": now})

    def remove(self, ids: Collection[str], reason: str) -> None:
        if ids:
            self._change({"gone": tuple(ids), "reason": reason})

    def refuse(self, reason: str) -> None:
        """Count a completion that was never added because of `reason`."""
        self._change({"collected": 1, "left": {reason: 1}, "departed": {}})

    def expire(self) -> None:
        """Remove what has waited too long."""
        oldest = self.now - self._settings.max_age_seconds
        late = list(takewhile(lambda record: record.created <= oldest, self._state.waiting.values()))
        self.remove([record.trajectory_id for record in late if record.rewarded is None], "no_reward")
        self.remove([record.trajectory_id for record in late if record.rewarded is not None], "unused")

    def report(self) -> TrajectoryReport:
        self.expire()
        waiting, num_left = self._state.waiting, self._state.num_left
        num_rewarded = sum(record.rewarded is not None for record in waiting.values())
        oldest = next(iter(waiting.values()), None)
        return TrajectoryReport(
            num_waiting=len(waiting) - num_rewarded,
            num_rewarded=num_rewarded,
            oldest_seconds=0.0 if oldest is None else max(0.0, self.now - oldest.created),
            num_collected=self._state.num_collected,
            num_reserved=len(self._state.reserved),
            num_trained=num_left[TRAINED],
            dropped={reason: count for reason, count in sorted(num_left.items()) if reason != TRAINED and count},
        )

    def recent(self, state: TrajectoryState | None, limit: int) -> list[RecentTrajectory]:
        """Return the newest first: those that wait, those of steps without a checkpoint, then ids that have left."""
        self.expire()
        found: list[RecentTrajectory] = []
        for one in self._newest_first():
            if len(found) == limit:
                break
            if state in (None, one.state):
                found.append(one)
        return found

    def _newest_first(self) -> Iterator[RecentTrajectory]:
        for record in reversed(self._state.waiting.values()):
            yield self._shown(record, "waiting" if record.rewarded is None else "rewarded")
        for reservation in reversed(self._state.reserved.values()):
            yield self._shown(reservation.record, "trained", reservation.step)
        for name, departure in reversed(self._state.departed.items()):
            if departure.reason == TRAINED:
                yield RecentTrajectory(id=name, state="trained", reward=departure.reward)
            else:
                yield RecentTrajectory(id=name, state="dropped", reason=departure.reason)

    def _shown(self, record: RecordedTrajectory, state: TrajectoryState, step: int | None = None) -> RecentTrajectory:
        trajectory, is_rewarded = record.trajectory, record.rewarded is not None
        return RecentTrajectory(
            id=record.trajectory_id,
            state=state,
            reward=trajectory.reward if is_rewarded else None,
            parts=trajectory.reward_parts if is_rewarded else {},
            waited=None if record.rewarded is None else max(0.0, record.rewarded - record.created),
            age=max(0.0, self.now - record.created),
            version=trajectory.weight_versions[-1].version if trajectory.weight_versions else None,
            step=step,
            text=trajectory.text,
            finish_reason=trajectory.finish_reason,
            prompt_tokens=trajectory.prompt_tokens,
        )

    async def written(self) -> None:
        """Wait until every change so far would survive the end of the process.

        Raises NotStored if the disk refuses one; it counts in this process all the same.
        """
        try:
            await self._journal.written()
        except OSError as error:
            raise NotStored(
                f"it counts for now, but the disk does not take it ({error.strerror or error}), so the end of the "
                "process would lose it; send it again when the disk has room"
            ) from error

    def close(self) -> None:
        """Wait until the file holds everything."""
        self._journal.close()

    def _least_wanted(self, count: int) -> list[str]:
        """Return the oldest ids that wait, those without a reward first, but not the newest of all."""
        older = list(islice(self._state.waiting.values(), len(self._state.waiting) - 1))
        older.sort(key=lambda record: record.rewarded is not None)  # stable, so the order of arrival stays
        return [record.trajectory_id for record in older[:count]]

    def _change(self, change: Change) -> None:
        self._state.apply(change)
        self._journal.append(change)
        num_records = len(self._state.waiting) + len(self._state.reserved)
        if self._journal.num_lines > LINES_PER_TRAJECTORY * max(self._settings.max_trajectories, num_records):
            self._write_anew()

    def _requeue(self, ids: Collection[str], *, has_failed: bool) -> None:
        if ids:
            self._change({"given_back": tuple(ids), "failed": has_failed})

    def _check_repeated(self, trajectory_id: str, reward: float) -> None:
        """Return if a step has this very reward: a client repeats a request whose answer was lost."""
        reserved, departed = self._state.reserved.get(trajectory_id), self._state.departed.get(trajectory_id)
        name = repr(trajectory_id[:100])
        if reserved is not None:
            if reserved.record.trajectory.reward != reward:
                raise Unavailable(f"trajectory {name} is being trained on with another reward; send rewards before")
        elif departed is not None and departed.reason == TRAINED:
            if departed.reward != reward:
                raise Unavailable(f"trajectory {name} was trained on already; send rewards before that")
        else:
            cause = "it was never collected, or left long ago" if departed is None else self._explain(departed.reason)
            raise UnknownTrajectory(f"no trajectory {name} waits for a reward: {cause}")

    def _explain(self, reason: str) -> str:
        late = f"it is older than {self._settings.max_age_seconds:g} s (rollout.live.max_age_seconds)"
        causes = {
            "no_reward": late,
            "unused": late,
            "full": f"{self._settings.max_trajectories} newer ones wait (rollout.live.max_trajectories)",
            "stale": "its version is too old to be trained on (trainer.max_off_policy_steps)",
        }
        return causes.get(reason, f"it was dropped ({reason})")

    def _write_anew(self) -> None:
        self._journal.rewrite(self._state.changes())

    def _read(self, file: Path) -> None:
        for line in read_journal(file):
            try:
                self._state.apply(line)
            except (KeyError, TypeError, ValueError):
                logger.warning("a line of %s cannot be read and is left out", file)
