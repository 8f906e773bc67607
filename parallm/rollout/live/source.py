"""What clients have asked one policy to learn from: from completions and rewards to the groups of a step."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallm.errors import InvalidRequest, Unavailable
from parallm.reports import TrajectoryReport
from parallm.rollout.collector import StepBatch
from parallm.rollout.environment_calls import EnvironmentFault
from parallm.rollout.live.buffer import TrajectoryBuffer
from parallm.rollout.live.grouping import Grouping, RecordedGroup, has_signal
from parallm.rollout.live.records import RecordedTrajectory, RewardRequest, record_completion
from parallm.rollout.live.scoring_dispatcher import SCALAR_REWARD, ScoringDispatcher
from parallm.rollout.live.scoring_functions import EnvironmentScoring
from parallm.rollout.scoring import MAX_REWARD
from parallm.rollout.settings import RolloutSettings
from parallm.types import Completion, GenerationRequest, SamplingParams, TrajectoryGroup

MAX_NAMES = 64
OTHER = "other"


class PartNames:
    """The first names stay; what comes under further ones counts as `other`. `known` stay in any case."""

    def __init__(self, known: Iterable[str]) -> None:
        self._names = set(known)

    def bounded(self, parts: Mapping[str, float]) -> dict[str, float]:
        """The parts under names that have a column, summed where several have the same."""
        found: dict[str, float] = {}
        for name, part in parts.items():
            if len(self._names) < MAX_NAMES:
                self._names.add(name)
            column = name if name in self._names else OTHER
            found[column] = found.get(column, 0.0) + part
        return found


UNDONE = "undone"
"""Why trajectories are dropped whose version was undone."""
FREE = ("max_tokens", "temperature", "seed", "stop", "stop_token_ids", "ignore_eos", "top_logprobs", "prompt_logprobs")
"""Sampling parameters that leave tokens samples of the policy; all others must be off."""
FIELDS = {"grammar": "response_format"}
"""What clients call a parameter, where it differs."""


class LiveSource:
    """Of one policy. For the asyncio thread; rewards count when they come, steps take what is ready."""

    def __init__(
        self,
        settings: RolloutSettings,
        file: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        min_reward: float = -MAX_REWARD,
    ) -> None:
        """Goes on with what `file` holds. Raises ConfigError for a scoring function that is not there."""
        self._settings = settings
        self._min_reward = min_reward
        self._scoring = ScoringDispatcher(
            settings.live.scoring_functions, settings.score_seconds, on_parts=self._scored, on_fault=self._not_scored
        )
        self._buffer = TrajectoryBuffer(settings.live, file, clock)
        self._names = PartNames(settings.live.weights)
        for one in self._buffer:
            self._names.bounded(one.trajectory.reward_parts)
        self._grouping = Grouping(settings=settings)
        self._on_reward: Callable[[str, float], None] = lambda *_: None
        self._batch: tuple[tuple[str, ...], ...] = ()  # the ids of the groups with signal that the last step took
        self._learned: tuple[str, ...] = ()  # what the newest version was made of
        self._num_stale = 0
        self._has_ended = False

    def connect(
        self, decode: Callable[[Sequence[int]], str], scores: Mapping[str, EnvironmentScoring] | None = None
    ) -> None:
        """From now on scoring functions are called; `decode` makes prompts of tokens.

        `scores` are those of the run's environment. Functions that the configuration names win.
        """
        self._scoring.connect(decode, scores or {})
        for one in self._buffer:
            self._scoring.begin(one, is_patient=True)

    def listen(self, on_reward: Callable[[str, float], None]) -> None:
        """From now on `on_reward` gets the id and the sum of each reward, those of scoring functions, too."""
        self._on_reward = on_reward

    def check(self, request: GenerationRequest, scoring_function: str | None, metadata: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for what could not be trained on, and Unavailable when training has ended."""
        if self._has_ended:
            raise Unavailable("training has ended, so nothing is collected any more; leave out collect_trajectory")
        if scoring_function is not None:
            self._scoring.check(scoring_function, metadata)
        num_bytes, most = len(json.dumps(metadata)), self._settings.live.max_metadata_bytes
        if num_bytes > most:
            raise InvalidRequest(
                f"metadata has {num_bytes} bytes as JSON, the limit is {most}; raise rollout.live.max_metadata_bytes",
                "metadata",
            )
        check_sampling(request.sampling)
        if self._settings.live.group_by == "request" and request.n < 2:
            raise InvalidRequest("collect_trajectory compares completions of a request here; send n of 2 or more", "n")

    def knows(self, trajectory_id: str) -> bool:
        """Whether a trajectory has this id, or had it not long ago."""
        return self._buffer.knows(trajectory_id)

    def record(
        self,
        trajectory_id: str,
        request: GenerationRequest,
        completion: Completion,
        scoring_function: str | None,
        metadata: Mapping[str, Any],
    ) -> bool:
        """Take in a completion of a request that `check` let pass; False for one that nothing can be learned from."""
        if completion.finish_reason == "abort" or not completion.tokens:
            self._buffer.refuse("aborted" if completion.finish_reason == "abort" else "no_tokens")
            return False
        reward_request = RewardRequest(scoring_function=scoring_function, metadata=metadata)
        one = record_completion(trajectory_id, request, completion, reward_request, self._buffer.now)
        if not self._buffer.add(one):
            return False
        self._scoring.begin(one)
        return True

    def reward(self, trajectory_id: str, reward: float | Mapping[str, float]) -> float:
        """Set a reward, parts by name or one number; returns the weighted sum. The last one counts.

        Raises UnknownTrajectory, Unavailable for one that a step has with another reward, and InvalidRequest for parts
        or a sum that cannot be trained on.
        """
        parts = dict(reward) if isinstance(reward, Mapping) else {SCALAR_REWARD: reward}
        total = self._total(parts)
        if fault := self._fault_of(parts, total):
            raise InvalidRequest(fault.detail, "reward")
        self._set_reward(trajectory_id, parts, total)
        return total

    async def written(self) -> None:
        """Wait until the end of the process would lose none of the completions and rewards so far. Raises NotStored."""
        await self._buffer.written()

    def report(self) -> TrajectoryReport:
        return self._buffer.report()

    def resume(self, step: int, *, version: int, now: int) -> str:
        """The run goes on after `step` with the weights of `version`, which it calls `now`; what later steps took
        waits again. Returns what waits in words, nothing if nothing does."""
        num_abandoned = self._buffer.resume(step)
        self._buffer.branch(version, now)
        report = self.report()
        if not (report.num_waiting or report.num_rewarded):
            return ""
        text = f"{report.num_waiting + report.num_rewarded} trajectories wait, {report.num_rewarded} with a reward"
        return text + (f", {num_abandoned} of steps after the checkpoint" if num_abandoned else "")

    def is_ready(self, version: int, limit: int) -> bool:
        """Whether a step may begin; lets go what is more than `limit` versions older than `version`."""
        self._buffer.expire()
        stale = [one.trajectory_id for one in self._buffer if is_stale(one, version, limit)]
        self._buffer.remove(stale, "stale")
        self._num_stale += len(stale)
        now = self._buffer.now
        return self._grouping.is_enough(self._grouping.piles(self._buffer, now), now)

    def take(self, step: int) -> StepBatch:
        """What `step` is about, after `is_ready`; it waits no more."""
        piles = self._grouping.first(self._grouping.piles(self._buffer, self._buffer.now))
        self._buffer.reserve([one.trajectory_id for pile in piles for one in pile], step)
        num_stale, self._num_stale = self._num_stale, 0
        good = list(filter(has_signal, piles))
        self._batch = tuple(ids for pile in good for ids in self._grouping.ids(pile))
        return StepBatch(groups=self._groups(piles), with_signal=self._groups(good), num_stale=num_stale)

    def saved(self, step: int) -> None:
        """A checkpoint holds what the steps until `step` have learned: these are trained on for good."""
        self._buffer.saved(step)

    def failed(self, step: int, culprits: Collection[tuple[int, int]]) -> None:
        """Because of a fault `step` has changed nothing: what it took waits again, but for the culprits.

        `culprits` by their group with signal and their place in it. Where all of them are suspected none is known.
        """
        named = {self._batch[group][place] for group, place in culprits}
        self._buffer.failed(step, named if len(named) < sum(map(len, self._batch)) else ())

    def learned(self) -> None:
        """The last step has made a version."""
        self._learned = tuple(name for ids in self._batch for name in ids)

    def undone(self, version: int, now: int) -> None:
        """The newest version was undone: the learner has the weights of `version` again, which it calls `now`.

        What it had learned from is dropped, since it has led to faults.
        """
        self._buffer.remove(self._learned, UNDONE)
        self._learned = ()
        self._buffer.branch(version, now)

    @property
    def message(self) -> str:
        """Why a step waits is for clients to know."""
        return ""

    @property
    def waiting(self) -> Mapping[str, float]:
        """How many trajectories are in the buffer, under flat names."""
        report = self.report()
        return {"live/waiting": report.num_waiting, "live/rewarded": report.num_rewarded}

    def end(self) -> None:
        """Nothing takes trajectories any more."""
        self._has_ended = True

    async def close(self) -> None:
        """Give up scores under way and wait until the file holds everything."""
        await self._scoring.close()
        await asyncio.to_thread(self._buffer.close)

    def _groups(self, piles: Sequence[RecordedGroup]) -> tuple[TrajectoryGroup, ...]:
        return tuple(group for pile in piles for group in self._grouping.groups(pile))

    def _set_reward(self, trajectory_id: str, parts: Mapping[str, float], total: float) -> None:
        self._buffer.reward(trajectory_id, total, self._names.bounded(parts))
        self._on_reward(trajectory_id, total)

    def _scored(self, one: RecordedTrajectory, parts: Mapping[str, float]) -> EnvironmentFault | None:
        total = self._total(parts)
        fault = self._fault_of(parts, total)
        # else a client was faster, or it is gone
        if fault is None and self._buffer.is_waiting(one.trajectory_id):
            self._set_reward(one.trajectory_id, parts, total)
        return fault

    def _not_scored(self, one: RecordedTrajectory, kind: str) -> None:
        if self._buffer.is_waiting(one.trajectory_id):
            self._buffer.remove([one.trajectory_id], f"score_{kind}")

    def _total(self, parts: Mapping[str, float]) -> float:
        return sum(self._settings.live.weights.get(name, 1.0) * part for name, part in parts.items())

    def _fault_of(self, parts: Mapping[str, float], total: float) -> EnvironmentFault | None:
        """Why these cannot be trained on."""
        wrong = next((value for value in (*parts.values(), total) if not abs(value) <= MAX_REWARD), None)
        if wrong is not None:
            return EnvironmentFault("too_large", f"the reward holds {wrong:g}; the limit is {MAX_REWARD:g} either way")
        if total < self._min_reward:
            return EnvironmentFault(
                "negative", f"the reward is {total:g}; learner.advantage=max_rl needs rewards of 0 or more"
            )
        return None


def check_sampling(sampling: SamplingParams) -> None:
    """Raise InvalidRequest where tokens are not sampled from the policy that is trained."""
    if sampling.temperature == 0:
        raise InvalidRequest(
            "collect_trajectory needs a temperature above 0: greedy tokens are no samples", "temperature"
        )
    for field in dataclasses.fields(SamplingParams):
        if field.name not in FREE and getattr(sampling, field.name) != field.default:
            name = FIELDS.get(field.name, field.name)
            raise InvalidRequest(
                f"collect_trajectory trains the policy on its own samples, which these are not with {name}; "
                "leave one of the two out",
                name,
            )


def is_stale(one: RecordedTrajectory, version: int, limit: int) -> bool:
    """Whether a token is more than `limit` versions older than `version`, or of a version that was abandoned."""
    return any(not 0 <= version - span.version <= limit for span in one.trajectory.weight_versions)
