"""What clients have asked one policy to learn from: from completions and rewards to the groups of a step."""

import asyncio
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from parallm.errors import InvalidRequest, Unavailable
from parallm.reports import TrajectoryReport
from parallm.rollout.environment_calls import EnvironmentCalls, EnvironmentFault, Outcome
from parallm.rollout.live.buffer import TRAINED, Buffer
from parallm.rollout.live.part_names import PartNames
from parallm.rollout.live.piles import Pile, Piling, has_signal
from parallm.rollout.live.recorded import Recorded, Wish, recorded_of
from parallm.rollout.live.scoring_functions import Answered, load_scoring_functions
from parallm.rollout.scoring import read_parts
from parallm.rollout.settings import RolloutSettings
from parallm.rollout.taken import Taken
from parallm.types import Completion, GenerationRequest, SamplingParams, TrajectoryGroup

logger = logging.getLogger(__name__)

ONLY = "reward"
"""The name of a reward that is one number."""
FREE = ("max_tokens", "temperature", "seed", "stop", "stop_token_ids", "ignore_eos", "top_logprobs", "prompt_logprobs")
"""Sampling parameters that leave tokens samples of the policy; all others must be off."""
FIELDS = {"grammar": "response_format"}
"""What clients call a parameter, where it differs."""


class LiveTraffic:
    """Of one policy. For the asyncio thread; rewards count when they come, steps take what is ready."""

    def __init__(self, settings: RolloutSettings, file: Path, clock: Callable[[], float] = time.time) -> None:
        """Goes on with what `file` holds. Raises ConfigError for a scoring function that is not there."""
        self._settings = settings
        self._functions = load_scoring_functions(settings.live.scoring_functions)
        self._calls = EnvironmentCalls(settings.score_seconds)
        self._buffer = Buffer(settings.live, file, clock)
        self._names = PartNames(settings.live.weights)
        for one in self._buffer:
            self._names.bounded(one.trajectory.reward_parts)
        self._clock = clock
        self._piling = Piling(settings=settings)
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._on_reward: Callable[[str, float], None] = lambda *_: None
        self._scoring: set[asyncio.Task[None]] = set()
        self._num_stale = 0
        self._has_ended = False

    def connect(self, decode: Callable[[Sequence[int]], str]) -> None:
        """From now on scoring functions are called; `decode` makes prompts of tokens."""
        self._decode = decode
        for one in self._buffer:
            self._score(one)

    def listen(self, on_reward: Callable[[str, float], None]) -> None:
        """From now on `on_reward` gets the id and the sum of each reward, those of scoring functions, too."""
        self._on_reward = on_reward

    def check(self, request: GenerationRequest, scoring_function: str | None, metadata: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for what could not be trained on, and Unavailable when training has ended."""
        if self._has_ended:
            raise Unavailable("training has ended, so nothing is collected any more; leave out collect_trajectory")
        if scoring_function is not None and scoring_function not in self._functions:
            known = ", ".join(sorted(self._functions)) or "none; name them in rollout.live.scoring_functions"
            raise InvalidRequest(
                f"no scoring_function {scoring_function[:50]!r}; there are {known}", "scoring_function"
            )
        num_bytes, most = len(json.dumps(metadata)), self._settings.live.max_metadata_bytes
        if num_bytes > most:
            raise InvalidRequest(
                f"metadata has {num_bytes} bytes as JSON, the limit is {most}; raise rollout.live.max_metadata_bytes",
                "metadata",
            )
        check_sampling(request.sampling)
        if self._settings.live.group_by == "request" and request.n < 2:
            raise InvalidRequest("collect_trajectory compares completions of a request here; send n of 2 or more", "n")

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
        wish = Wish(scoring_function=scoring_function, metadata=metadata)
        one = recorded_of(trajectory_id, request, completion, wish, self._clock())
        self._buffer.add(one)
        self._score(one)
        return True

    def reward(self, trajectory_id: str, reward: float | Mapping[str, float]) -> float:
        """Set a reward, parts by name or one number; returns the weighted sum. The last one counts.

        Raises UnknownTrajectory, Unavailable for one that was trained on, and InvalidRequest for parts whose sum is
        not finite.
        """
        parts = dict(reward) if isinstance(reward, Mapping) else {ONLY: reward}
        total = sum(self._settings.live.weights.get(name, 1.0) * part for name, part in parts.items())
        if not math.isfinite(total):
            raise InvalidRequest("the reward's parts add up to no finite number", "reward")
        self._buffer.reward(trajectory_id, total, self._names.bounded(parts))
        self._on_reward(trajectory_id, total)
        return total

    def report(self) -> TrajectoryReport:
        return self._buffer.report()

    def is_ready(self, version: int, limit: int) -> bool:
        """Whether a step may begin; lets go what is more than `limit` versions older than `version`, or of another."""
        self._buffer.expire()
        stale = [one.trajectory_id for one in self._buffer if is_stale(one, version, limit)]
        self._buffer.remove(stale, "stale")
        self._num_stale += len(stale)
        now = self._clock()
        return self._piling.is_enough(self._piling.piles(self._buffer, now), now)

    def take(self) -> Taken:
        """What the next step is about, after `is_ready`; it leaves the buffer."""
        piles = self._piling.first(self._piling.piles(self._buffer, self._clock()))
        self._buffer.remove([one.trajectory_id for pile in piles for one in pile], TRAINED)
        num_stale, self._num_stale = self._num_stale, 0
        with_signal = self._groups(list(filter(has_signal, piles)))
        return Taken(groups=self._groups(piles), with_signal=with_signal, num_stale=num_stale)

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
        for task in self._scoring:
            task.cancel()
        await asyncio.gather(*self._scoring, return_exceptions=True)
        await asyncio.to_thread(self._buffer.close)

    def _groups(self, piles: Sequence[Pile]) -> tuple[TrajectoryGroup, ...]:
        return tuple(group for pile in piles for group in self._piling.groups(pile))

    def _score(self, one: Recorded) -> None:
        """Call the scoring function that the client has asked for, if it has, and if calls are possible yet."""
        if one.wish.scoring_function is not None and one.rewarded is None and self._decode is not None:
            task = asyncio.create_task(self._scored(one, self._decode(one.trajectory.prompt_tokens)))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)

    async def _scored(self, one: Recorded, prompt: str) -> None:
        name = one.wish.scoring_function or ""
        answered = Answered(
            prompt=prompt,
            text=one.trajectory.text,
            finish_reason=one.trajectory.finish_reason,
            metadata=one.wish.metadata,
        )
        function = self._functions.get(name)
        if function is None:  # of a file that another configuration has left
            self._drop(one, EnvironmentFault("missing", ""))
            return
        (outcome,) = await self._calls.call_all([partial(function, answered)])
        parts: dict[str, float] = {}
        fault = outcome.fault or read_parts(_by_name(outcome), parts)
        if fault is not None:
            self._drop(one, fault)
            return
        if not self._buffer.is_waiting(one.trajectory_id):
            return  # the client was faster, or it is gone
        try:
            self.reward(one.trajectory_id, parts)
        except InvalidRequest:
            self._drop(one, EnvironmentFault("not_finite", ""))

    def _drop(self, one: Recorded, fault: EnvironmentFault) -> None:
        """The log gets the kind of an exception but not its text, which may quote metadata."""
        what = fault.detail.partition("(")[0] if fault.kind == "raised" else ""
        logger.warning(
            "scoring function %s: %s %s; the trajectory is dropped", one.wish.scoring_function, fault.kind, what
        )
        self._buffer.remove([one.trajectory_id], f"score_{fault.kind}")


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


def is_stale(one: Recorded, version: int, limit: int) -> bool:
    """Whether a token is more than `limit` versions older than `version`, or of a version that was abandoned."""
    return any(not 0 <= version - span.version <= limit for span in one.trajectory.weight_versions)


def _by_name(outcome: Outcome) -> object:
    value = outcome.value
    return {ONLY: value} if isinstance(value, int | float) else value
