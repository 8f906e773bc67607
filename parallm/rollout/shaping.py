"""Reward parts that depend on a completion's length alone, whatever the environment. Used by `Collector`. Pure."""

from dataclasses import dataclass

from parallm.rollout.runner import ScoredEpisode
from parallm.rollout.settings import RolloutSettings

OVERLONG = "rollout/overlong"
LENGTH = "rollout/length"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedReward:
    """Parts and reward as the learner gets them."""

    parts: dict[str, float]
    reward: float


def shape_reward(scored: ScoredEpisode, settings: RolloutSettings) -> ShapedReward:
    """Add the parts that `settings` turns on to those of the score."""
    length = len(scored.episode.tokens)
    parts, reward = dict(scored.score.parts), scored.score.reward
    if settings.overlong_buffer > 0:
        parts[OVERLONG] = overlong_part(length, max_tokens=settings.max_tokens, buffer=settings.overlong_buffer)
        reward += settings.overlong_weight * parts[OVERLONG]
    if settings.length_weight > 0:
        # wrong answers pay nothing: a group without a right one would learn only to be short
        parts[LENGTH] = -length / settings.max_tokens if scored.score.is_correct else 0.0
        reward += settings.length_weight * parts[LENGTH]
    return ShapedReward(parts=parts, reward=reward)


def overlong_part(length: int, *, max_tokens: int, buffer: int) -> float:
    """Return 0 up to `max_tokens - buffer` tokens, then a value that falls linearly to -1 at `max_tokens`.

    The soft overlong punishment of DAPO, equation 13: https://arxiv.org/abs/2503.14476
    """
    return min(0.0, (max_tokens - buffer - length) / buffer)


def loss_mask(scored: ScoredEpisode, settings: RolloutSettings) -> tuple[bool, ...]:
    """Return which tokens are trained on: the sampled ones, or none of a truncated completion with `mask_truncated`.

    Such a completion still counts in its group's mean reward.
    """
    episode = scored.episode
    if settings.mask_truncated and episode.finish_reason == "length":
        return (False,) * len(episode.tokens)
    return tuple(episode.is_sampled)
