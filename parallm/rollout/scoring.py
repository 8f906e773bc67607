"""Episodes -> reward parts: the environment's, and those that depend on length alone.

Whatever an environment does instead of scoring costs one episode and is counted. Used by `RolloutRunner` and
`Collector`; `FaultLog` names the faults in the log of a run.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from parallm.environment.environment import AnyEnvironment, environment_of, is_multi_turn, is_stateful
from parallm.errors import EnvironmentFailed
from parallm.rollout.environment_calls import CallResult, EnvironmentFault
from parallm.rollout.episode import Episode
from parallm.rollout.settings import RolloutSettings
from parallm.types import FaultyEpisode, Problem

logger = logging.getLogger(__name__)

CORRECT = "correct"
REWARD_MODEL = "rollout/reward_model"
"""The reward model's part, which says nothing about right and wrong."""
SCALAR_REWARD = "reward"
"""Name of the part of a reward that is one number."""
OVERLONG = "rollout/overlong"
LENGTH = "rollout/length"
MAX_REWARD = 1e9
"""Largest absolute value of a reward or a part. Advantages are float32, and so is the sum of the squares of a gradient,
which grows with them: a larger reward could make that of a whole step infinite."""
NO_TOKENS = "no_tokens"
"""Kind of fault of a completion without any token."""
MAX_TRACEBACKS = 20
"""Tracebacks in the log of a run: an environment that generates code could raise at ever new places."""
MAX_SHOWN = 3
MAX_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward of one episode. With a fault there are no parts, and the reward is NaN."""

    parts: Mapping[str, float]
    reward: float
    fault: FaultyEpisode | None = None

    @property
    def is_correct(self) -> bool:
        """Whether the part `correct` is 1; without such a part, whether there are parts and all of them are 1."""
        if self.fault is not None:
            return False
        if CORRECT in self.parts:
            return self.parts[CORRECT] == 1
        parts = [part for name, part in self.parts.items() if name != REWARD_MODEL]
        return bool(parts) and all(part == 1 for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    episode: Episode
    score: Score


def score_call(environment: AnyEnvironment, episode: Episode) -> Callable[[], object]:
    """Return the call that scores `episode`: with its turns where there may be several, else with its text."""
    environment = environment_of(environment, episode.problem)
    if episode.session is not None:
        return partial(episode.session.score, tuple(episode.turns), is_cut_off=episode.finish_reason == "length")
    assert not is_stateful(environment), "the runner opens its sessions"
    if is_multi_turn(environment):
        return partial(environment.score, episode.problem, tuple(episode.turns))
    return partial(environment.score, episode.problem, episode.text)


def to_score(environment: AnyEnvironment, episode: Episode, result: CallResult) -> ScoredEpisode:
    """Return the episode with the score in what `score_call` has returned, or with the fault in place of one."""
    weights = environment_of(environment, episode.problem).weights
    parts: dict[str, float] = {}
    fault = episode.fault or result.fault or read_parts(result.value, parts)
    reward = sum(weights.get(name, 0.0) * value for name, value in parts.items())
    if fault is None and not abs(reward) <= MAX_REWARD:
        kind = "too_large" if math.isfinite(reward) else "not_finite"
        fault = EnvironmentFault(kind, f"the parts {parts} add up to {reward}; the limit is {MAX_REWARD:g} either way")
    if fault is None:
        return ScoredEpisode(episode=episode, score=Score(parts=parts, reward=reward))
    kind = f"{'reply' if episode.fault else 'score'}_{fault.kind}"
    faulty = episode.faulty(kind, fault.detail, fault.traceback)
    return ScoredEpisode(episode=episode, score=Score(parts={}, reward=math.nan, fault=faulty))


def read_parts(value: object, parts: dict[str, float]) -> EnvironmentFault | None:
    """Put the parts that `score` has returned into `parts`, as floats; return a fault if one is no finite number."""
    if not isinstance(value, Mapping):
        return EnvironmentFault("malformed", f"score returned {value!r:.80}, not a mapping of names to numbers")
    for name, part in value.items():
        try:
            number = None if isinstance(part, str) else float(part)
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None:
            return EnvironmentFault("malformed", f"the part {name!r} is {part!r:.80}, not a number")
        if not math.isfinite(number):
            return EnvironmentFault("not_finite", f"the part {name!r} is {number}")
        if abs(number) > MAX_REWARD:
            return EnvironmentFault(
                "too_large", f"the part {name!r} is {number}; the limit is {MAX_REWARD:g} either way"
            )
        parts[str(name)] = number
    return None


def shape_reward(scored: ScoredEpisode, settings: RolloutSettings) -> tuple[dict[str, float], float]:
    """Return parts and reward as the learner gets them: with the parts for length that `settings` turns on."""
    length = len(scored.episode.tokens)
    parts, reward = dict(scored.score.parts), scored.score.reward
    if settings.overlong_buffer > 0:
        parts[OVERLONG] = overlong_part(length, max_tokens=settings.max_tokens, buffer=settings.overlong_buffer)
        reward += settings.overlong_weight * parts[OVERLONG]
    if settings.length_weight > 0:
        # wrong answers pay nothing: a group without a right one would learn only to be short
        parts[LENGTH] = -length / settings.max_tokens if scored.score.is_correct else 0.0
        reward += settings.length_weight * parts[LENGTH]
    return parts, reward


def overlong_part(length: int, *, max_tokens: int, buffer: int) -> float:
    """Return 0 up to `max_tokens - buffer` tokens, then a value that falls linearly to -1 at `max_tokens`.

    The soft overlong punishment of DAPO, equation 13: https://arxiv.org/abs/2503.14476
    """
    return min(0.0, (max_tokens - buffer - length) / buffer)


def loss_mask(scored: ScoredEpisode, settings: RolloutSettings) -> Sequence[bool]:
    """Return which tokens are trained on: the sampled ones, or none of a truncated completion with `mask_truncated`.

    Such a completion still counts in its group's mean reward.
    """
    episode = scored.episode
    if settings.mask_truncated and episode.finish_reason == "length":
        return [False] * len(episode.tokens)
    return episode.is_sampled


class FaultLog:
    """Names the faults of a run in its log, each traceback once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()  # locations

    def log(self, when: str, faults: Iterable[tuple[Problem, FaultyEpisode]]) -> None:
        """Log the first faults of each kind with their texts; `when` is, say, `step 3`."""
        kinds: dict[str, list[tuple[Problem, FaultyEpisode]]] = {}
        for problem, fault in faults:
            kinds.setdefault(fault.kind, []).append((problem, fault))
        for kind, pairs in kinds.items():
            for problem, fault in pairs[:MAX_SHOWN]:
                text = fault.text if len(fault.text) <= MAX_CHARACTERS else fault.text[:MAX_CHARACTERS] + " ..."
                logger.warning("%s, %s: %s; problem %s, text %r", when, kind, fault.detail, problem.problem_id, text)
            if len(pairs) > MAX_SHOWN:
                logger.warning("%s, %s: %d more completions", when, kind, len(pairs) - MAX_SHOWN)
            for _, fault in pairs:
                self._log_traceback(when, kind, fault)

    def _log_traceback(self, when: str, kind: str, fault: FaultyEpisode) -> None:
        location = error_location(fault)
        if location and location not in self._logged and len(self._logged) < MAX_TRACEBACKS:
            self._logged.add(location)
            logger.warning("%s, %s, where it was raised first:\n%s", when, kind, fault.traceback)


def error_location(fault: FaultyEpisode) -> str:
    """Return the frames of a traceback without its message, which may differ from completion to completion."""
    return "\n".join(line for line in fault.traceback.splitlines() if line.startswith("  "))


def raise_if_none_scored(when: str, faults: Sequence[FaultyEpisode], num_scored: int) -> None:
    """Raise EnvironmentFailed, with the first traceback, if the environment has failed at every single completion."""
    faults = [fault for fault in faults if fault.kind != NO_TOKENS]
    if num_scored or not faults:
        return
    first = next((fault for fault in faults if fault.traceback), faults[0])
    counts = dict(Counter(fault.kind for fault in faults))
    raise EnvironmentFailed(
        f"{when}: not one of {len(faults)} completions could be scored ({counts}); correct the environment. The first: "
        f"{first.traceback or first.detail}"
    )
