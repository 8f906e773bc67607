"""The policy-gradient objective as pure functions over flat arrays, and the published presets of it.

Ratio to the policy that sampled, clipped (PPO, https://arxiv.org/abs/1707.06347); advantages relative to the group of
completions of one problem (GRPO, https://arxiv.org/abs/2402.03300). Presets differ in three choices:

  dapo     A = r - mean,              clip 0.2 / 0.28, mean over all tokens of the step   https://arxiv.org/abs/2503.14476
  grpo     A = (r - mean) / std,      clip 0.2 / 0.2,  mean over tokens, then completions https://arxiv.org/abs/2402.03300
  dr_grpo  A = r - mean,              clip 0.2 / 0.2,  sum / (completions x max_tokens)   https://arxiv.org/abs/2503.20783

DAPO's paper divides by the standard deviation too; here it does not, as Dr. GRPO advises.
Axes: G completions of a group, N tokens of any completions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

Aggregation = Literal["token_mean", "completion_mean", "constant"]
STANDARD_DEVIATION_EPSILON = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """`clip_low` and `clip_high` are relative: the ratio is held within [1 - clip_low, 1 + clip_high]."""

    divide_by_std: bool
    clip_low: float
    clip_high: float
    aggregation: Aggregation


PRESETS = {
    "dapo": Objective(divide_by_std=False, clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
    "grpo": Objective(divide_by_std=True, clip_low=0.2, clip_high=0.2, aggregation="completion_mean"),
    "dr_grpo": Objective(divide_by_std=False, clip_low=0.2, clip_high=0.2, aggregation="constant"),
}


def group_advantages(rewards_G: Sequence[float], divide_by_std: bool) -> np.ndarray:
    """Rewards minus their mean, divided by their standard deviation (ddof 1) if asked; float32 (G,).

    A reward that is not finite makes NaN of all of them, and so of the step's loss.
    """
    rewards = np.asarray(rewards_G, np.float64)
    if not np.isfinite(rewards).all():
        return np.full(len(rewards), np.nan, np.float32)
    centred = rewards - rewards.mean()
    if divide_by_std:
        centred = centred / (rewards.std(ddof=1) + STANDARD_DEVIATION_EPSILON)
    return centred.astype(np.float32)


def token_weight(objective: Objective, *, length: int, num_tokens: int, num_completions: int, max_tokens: int) -> float:
    """What one token's loss counts in the step's loss.

    `length` is the number of trained tokens of its completion, `num_tokens` and `num_completions` those of the step,
    `max_tokens` the limit of a completion.
    """
    if objective.aggregation == "token_mean":
        return 1.0 / max(num_tokens, 1)
    if objective.aggregation == "completion_mean":
        return 1.0 / (max(num_completions, 1) * max(length, 1))
    return 1.0 / (max(num_completions, 1) * max_tokens)


def policy_loss(
    logprobs_N: mx.array, behaviour_N: mx.array, advantages_N: mx.array, weights_N: mx.array, objective: Objective
) -> mx.array:
    """Scalar: sum of weights x max(-ratio A, -clip(ratio) A). A weight of zero masks a token."""
    ratio_N = mx.exp(logprobs_N - behaviour_N)
    clipped_N = mx.clip(ratio_N, 1 - objective.clip_low, 1 + objective.clip_high)
    return (weights_N * mx.maximum(-ratio_N * advantages_N, -clipped_N * advantages_N)).sum()


def is_clipped(logprobs_N: mx.array, behaviour_N: mx.array, advantages_N: mx.array, objective: Objective) -> mx.array:
    """True (N,) where clipping removes the gradient."""
    ratio_N = mx.exp(logprobs_N - behaviour_N)
    above_N = (advantages_N > 0) & (ratio_N > 1 + objective.clip_high)
    below_N = (advantages_N < 0) & (ratio_N < 1 - objective.clip_low)
    return above_N | below_N


def kl_k3(logprobs_N: mx.array, behaviour_N: mx.array) -> mx.array:
    """Per token, the estimator ratio - 1 - log ratio of KL(behaviour, policy): http://joschu.net/blog/kl-approx.html"""
    difference_N = logprobs_N - behaviour_N
    return mx.exp(difference_N) - 1 - difference_N
