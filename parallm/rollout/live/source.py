"""Completions that clients ask one policy to learn from, and their rewards -> the groups of a step.

The server records completions and rewards; `ClientTrainer` takes the groups and reports what became of them.
"""

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallm.errors import InvalidRequest, Unavailable
from parallm.reports import TrajectoryReport
from parallm.rollout.collector import StepBatch
from parallm.rollout.environment_calls import EnvironmentFault
from parallm.rollout.live.buffer import TrajectoryBuffer
from parallm.rollout.live.records import RecordedTrajectory, prompt_id
from parallm.rollout.live.scoring_dispatcher import ScoringDispatcher
from parallm.rollout.live.scoring_functions import EnvironmentScoring
from parallm.rollout.scoring import MAX_REWARD, SCALAR_REWARD
from parallm.rollout.settings import RolloutSettings
from parallm.rollout.staleness import is_stale
from parallm.types import (
    Completion,
    GenerationRequest,
    Problem,
    RecentTrajectory,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    TrajectoryState,
)

UNDONE = "undone"
"""Reason of trajectories that are dropped because their version was undone."""
MAX_NAMES = 64
"""Names of reward parts, which clients choose and which become columns of metrics.jsonl and labels of `/metrics`."""
OTHER = "other"
HARMLESS = frozenset(
    ("max_tokens", "temperature", "seed", "stop", "stop_token_ids", "ignore_eos", "top_logprobs", "prompt_logprobs")
)
"""Sampling parameters with which tokens stay samples of the policy; all others must be off."""
FIELDS = {"grammar": "response_format"}
"""Clients' names of parameters, where they differ."""
MIN_GROUP_SIZE = 2
"""Completions that a comparison needs."""
RecordedGroup = Sequence[RecordedTrajectory]


class LiveSource:
    """The source of one policy. Used on the asyncio thread."""

    message = ""
    """Nothing explains why a step waits: it waits for clients."""

    def __init__(
        self,
        settings: RolloutSettings,
        file: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        min_reward: float = -MAX_REWARD,
    ) -> None:
        """Resume from `file`. Raises ConfigError for a scoring function that is not there."""
        self._settings = settings
        self._min_reward = min_reward
        self._dispatcher = ScoringDispatcher(
            settings.live.scoring_functions, settings.score_seconds, on_parts=self._scored, on_fault=self._not_scored
        )
        self._buffer = TrajectoryBuffer(settings.live, file, clock)
        self._names = PartNames(settings.live.weights)
        for record in self._buffer:
            self._names.bounded(record.trajectory.reward_parts)
        self._grouping = Grouping(settings=settings)
        self._on_reward: Callable[[str, float], None] = lambda *_: None
        self._batch: tuple[tuple[str, ...], ...] = ()  # ids in the groups with signal that the last step took
        self._learned: tuple[str, ...] = ()  # ids that the newest version was made of
        self._num_stale = 0
        self._has_ended = False

    def connect(
        self, decode: Callable[[Sequence[int]], str], scores: Mapping[str, EnvironmentScoring] | None = None
    ) -> None:
        """Begin to call scoring functions; `decode` makes prompts of tokens.

        `scores` are those of the run's environment. Functions that the configuration names win.
        """
        self._dispatcher.connect(decode, scores or {})
        for record in self._buffer:
            self._dispatcher.begin(record, is_patient=True)

    def listen(self, on_reward: Callable[[str, float], None]) -> None:
        """Call `on_reward` with the id and the sum of each reward from now on, those of scoring functions included."""
        self._on_reward = on_reward

    def check(self, request: GenerationRequest, scoring_function: str | None, metadata: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for what could not be trained on, and Unavailable when training has ended."""
        if self._has_ended:
            raise Unavailable("training has ended, so nothing is collected any more; leave out collect_trajectory")
        if scoring_function is not None:
            self._dispatcher.check(scoring_function, metadata)
        num_bytes, limit = len(json.dumps(metadata)), self._settings.live.max_metadata_bytes
        if num_bytes > limit:
            raise InvalidRequest(
                f"metadata has {num_bytes} bytes as JSON, the limit is {limit}; raise rollout.live.max_metadata_bytes",
                "metadata",
            )
        check_sampling(request.sampling)
        if self._settings.live.group_by == "request" and request.n < 2:
            raise InvalidRequest("collect_trajectory compares completions of a request here; send n of 2 or more", "n")

    def knows(self, trajectory_id: str) -> bool:
        return self._buffer.knows(trajectory_id)

    def record(
        self,
        trajectory_id: str,
        request: GenerationRequest,
        completion: Completion,
        scoring_function: str | None,
        metadata: Mapping[str, Any],
    ) -> bool:
        """Add a completion of a request that `check` let pass; return False for one without anything to learn."""
        if completion.finish_reason == "abort" or not completion.tokens:
            self._buffer.refuse("aborted" if completion.finish_reason == "abort" else "no_tokens")
            return False
        trajectory = Trajectory(
            problem_id=prompt_id(request.prompt_tokens),
            prompt_tokens=request.prompt_tokens,
            tokens=completion.tokens,
            loss_mask=(True,) * len(completion.tokens),
            logprobs=completion.logprobs,
            temperature=request.sampling.temperature,
            weight_versions=completion.weight_versions,
            reward_parts={},
            reward=0.0,
            text=completion.text,
            finish_reason=completion.finish_reason,
        )
        record = RecordedTrajectory(
            trajectory_id=trajectory_id,
            trajectory=trajectory,
            request_id=request.request_id,
            num_asked=request.n,
            created=self._buffer.now,
            scoring_function=scoring_function,
            metadata=metadata,
        )
        if not self._buffer.add(record):
            return False
        self._dispatcher.begin(record)
        return True

    def reward(self, trajectory_id: str, reward: float | Mapping[str, float]) -> float:
        """Set a reward, parts by name or one number, and return the weighted sum. The last reward counts.

        Raises UnknownTrajectory, Unavailable for a trajectory that a step has with another reward, and InvalidRequest
        for parts or a sum that cannot be trained on.
        """
        parts = dict(reward) if isinstance(reward, Mapping) else {SCALAR_REWARD: reward}
        total = self._total(parts)
        if fault := self._fault_of(parts, total):
            raise InvalidRequest(fault.detail, "reward")
        self._set_reward(trajectory_id, parts, total)
        return total

    async def written(self) -> None:
        """Wait until all completions and rewards so far would survive the end of the process. Raises NotStored."""
        await self._buffer.written()

    def report(self) -> TrajectoryReport:
        return self._buffer.report()

    def recent(self, state: TrajectoryState | None, limit: int) -> list[RecentTrajectory]:
        """Return up to `limit` of what clients have marked, the newest first; of `state` alone, if one is given."""
        return self._buffer.recent(state, limit)

    def resume(self, step: int, *, version: int, now: int) -> str:
        """Resume after `step` with the weights of `version`, which the run calls `now`: what later steps took waits
        again. Return what waits in words; empty if nothing waits."""
        num_abandoned = self._buffer.resume(step)
        self._buffer.branch(version, now)
        report = self.report()
        if not (report.num_waiting or report.num_rewarded):
            return ""
        text = f"{report.num_waiting + report.num_rewarded} trajectories wait, {report.num_rewarded} with a reward"
        return text + (f", {num_abandoned} of steps after the checkpoint" if num_abandoned else "")

    def is_ready(self, version: int, limit: int) -> bool:
        """Whether a step may begin; drops trajectories that are more than `limit` versions older than `version`."""
        self._buffer.expire()
        stale = [record.trajectory_id for record in self._buffer if is_stale([record.trajectory], version, limit)]
        self._buffer.remove(stale, "stale")
        self._num_stale += len(stale)
        now = self._buffer.now
        return self._grouping.is_enough(self._grouping.recorded_groups(self._buffer, now), now)

    def missing(self) -> str:
        """Why no step begins unless clients send more; empty if time or a scoring function may bring one about."""
        groups = self._grouping.recorded_groups(self._buffer, math.inf)
        if self._dispatcher.is_scoring or self._grouping.is_enough(groups, math.inf):
            return ""
        report = self.report()
        return (
            f"no step can begin: {report.num_waiting + report.num_rewarded} trajectories wait, {report.num_rewarded} "
            "of them with a reward, and a step needs rewards that differ; send completions with collect_trajectory and "
            "their rewards first, or `trajectories` with this request"
        )

    def take(self, step: int, *, needs_all_groups: bool = False) -> StepBatch:
        """Return the groups of `step`, after `is_ready`, and reserve them. `needs_all_groups`: also train on those
        whose rewards are equal."""
        groups = self._grouping.take(self._grouping.recorded_groups(self._buffer, self._buffer.now))
        self._buffer.reserve([record.trajectory_id for group in groups for record in group], step)
        num_stale, self._num_stale = self._num_stale, 0
        parts = self._grouping.parts(groups)
        parts_with_signal = self._grouping.parts(filter(has_signal, groups))
        trained = parts if needs_all_groups else parts_with_signal
        self._batch = tuple(tuple(record.trajectory_id for record in group) for group in trained)
        return StepBatch(
            groups=tuple(map(_trajectory_group, parts)),
            with_signal=tuple(map(_trajectory_group, parts_with_signal)),
            trained=tuple(map(_trajectory_group, trained)),
            num_stale=num_stale,
        )

    def saved(self, step: int) -> None:
        """Count as trained what the steps up to `step` have learned from, which a checkpoint holds."""
        self._buffer.saved(step)

    def failed(self, step: int, culprits: Collection[tuple[int, int]]) -> None:
        """Let what `step` took wait again, after a fault because of which it changed nothing, except the culprits.

        `culprits` are indices of a trained group and of a trajectory in it. If they are all of the step, none is
        dropped, since the real one is unknown.
        """
        ids = {self._batch[group][index] for group, index in culprits}
        self._buffer.failed(step, ids if len(ids) < sum(map(len, self._batch)) else ())

    def learned(self) -> None:
        """Note that the last step has made a version."""
        self._learned = tuple(name for ids in self._batch for name in ids)

    def undone(self, version: int, now: int) -> None:
        """Drop what the newest version had learned from, since it has led to faults.

        The learner has the weights of `version` again, which it calls `now`.
        """
        self._buffer.remove(self._learned, UNDONE)
        self._learned = ()
        self._buffer.branch(version, now)

    @property
    def waiting(self) -> Mapping[str, float]:
        """Numbers of trajectories in the buffer, under flat names of the metrics."""
        report = self.report()
        return {"live/waiting": report.num_waiting, "live/rewarded": report.num_rewarded}

    def end(self) -> None:
        """Refuse further trajectories: training has ended."""
        self._has_ended = True

    async def close(self) -> None:
        """Cancel scores under way and wait until the file holds everything."""
        await self._dispatcher.close()
        await asyncio.to_thread(self._buffer.close)

    def _set_reward(self, trajectory_id: str, parts: Mapping[str, float], total: float) -> None:
        self._buffer.reward(trajectory_id, total, self._names.bounded(parts))
        self._on_reward(trajectory_id, total)

    def _scored(self, record: RecordedTrajectory, parts: Mapping[str, float]) -> EnvironmentFault | None:
        total = self._total(parts)
        fault = self._fault_of(parts, total)
        # else a client was faster, or the trajectory has left
        if fault is None and self._buffer.is_waiting(record.trajectory_id):
            self._set_reward(record.trajectory_id, parts, total)
        return fault

    def _not_scored(self, record: RecordedTrajectory, kind: str) -> None:
        if self._buffer.is_waiting(record.trajectory_id):
            self._buffer.remove([record.trajectory_id], f"score_{kind}")

    def _total(self, parts: Mapping[str, float]) -> float:
        return sum(self._settings.live.weights.get(name, 1.0) * part for name, part in parts.items())

    def _fault_of(self, parts: Mapping[str, float], total: float) -> EnvironmentFault | None:
        """Return why these cannot be trained on."""
        excess = next((value for value in (*parts.values(), total) if not abs(value) <= MAX_REWARD), None)
        if excess is not None:
            return EnvironmentFault("too_large", f"the reward holds {excess:g}; the limit is {MAX_REWARD:g} either way")
        if total < self._min_reward:
            return EnvironmentFault(
                "negative", f"the reward is {total:g}; learner.advantage=max_rl needs rewards of 0 or more"
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Makes groups of completions with a reward: which of them are compared with one another. Pure.

    A recorded group becomes a group of the learner, or with `group_by=none` everything that one step trains on.
    """

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
                by_key.setdefault(self._key_and_size(record)[0], []).append(record)
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

    def parts(self, groups: Iterable[RecordedGroup]) -> list[RecordedGroup]:
        """Return the learner's groups, whose trajectories share one prompt: with `group_by=none` each is alone."""
        is_alone = self.settings.live.group_by == "none"
        return [[record] for group in groups for record in group] if is_alone else list(groups)

    def _key_and_size(self, record: RecordedTrajectory) -> tuple[str, int]:
        """Return what the records of a whole group share, and how many they are."""
        match self.settings.live.group_by:
            case "prompt":
                return record.trajectory.problem_id, self.settings.group_size
            case "request":
                return record.request_id, record.num_asked
            case "none":
                return "", self.settings.problems_per_step * self.settings.group_size

    def _cut(self, rewarded: Sequence[RecordedTrajectory], now: float) -> Iterator[RecordedGroup]:
        _, size = self._key_and_size(rewarded[0])
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


def check_sampling(sampling: SamplingParams) -> None:
    """Raise InvalidRequest for tokens that are not sampled from the policy that is trained."""
    if sampling.temperature == 0:
        raise InvalidRequest(
            "collect_trajectory needs a temperature above 0: greedy tokens are no samples", "temperature"
        )
    for field in dataclasses.fields(SamplingParams):
        if field.name not in HARMLESS and getattr(sampling, field.name) != field.default:
            name = FIELDS.get(field.name, field.name)
            raise InvalidRequest(
                f"collect_trajectory trains the policy on its own samples, which these are not with {name}; "
                "leave one of the two out",
                name,
            )


class PartNames:
    """Bounds the names of reward parts: the first ones stay, and parts under further names count as `other`."""

    def __init__(self, configured: Iterable[str]) -> None:
        self._names = set(configured)

    def bounded(self, parts: Mapping[str, float]) -> dict[str, float]:
        columns: dict[str, float] = {}
        for name, part in parts.items():
            if len(self._names) < MAX_NAMES:
                self._names.add(name)
            column = name if name in self._names else OTHER
            columns[column] = columns.get(column, 0.0) + part
        return columns
