"""Weights without a gradient, for tokens of a policy that is no longer the learner's, and for tokens worth training on.

Axes: S sequences, N tokens of any of them.
"""

import math

import mlx.core as mx
import numpy as np

from parallm.learner.rows import Rows
from parallm.learner.settings import Correction


def importance_weights(
    old_N: mx.array, behaviour_N: mx.array, rows: Rows, *, correction: Correction, ratio_min: float, ratio_max: float
) -> mx.array:
    """Probability of the learner over that of the sampler, per token or of the whole sequence, (N,).

    Truncated (https://fengyao.notion.site/off-policy-rl) or zero outside of the two limits (IcePop,
    https://arxiv.org/abs/2510.18855), which are absolute.
    """
    log_weight_N = old_N - behaviour_N
    if correction in ("sequence_truncate", "sequence_mask"):
        log_weight_N = rows.spread(rows.sums(log_weight_N))
    if correction in ("token_truncate", "sequence_truncate"):
        weight_N = mx.maximum(mx.exp(mx.minimum(log_weight_N, math.log(ratio_max))), ratio_min)
    else:
        weight_N = mx.exp(log_weight_N)
        weight_N = mx.where((weight_N < ratio_min) | (weight_N > ratio_max), 0.0, weight_N)  # NaN stays NaN
    return mx.stop_gradient(weight_N)


def keeps_sequence(
    logprobs_N: mx.array, behaviour_N: mx.array, advantages_N: mx.array, rows: Rows, kl_max: float
) -> mx.array:
    """False (N,) for bad completions that the policy has left behind: their mean log-prob fell by more than `kl_max`.

    Off-policy sequence masking of DeepSeek-V3.2: https://arxiv.org/abs/2512.02556
    """
    fall_S = rows.means(mx.stop_gradient(behaviour_N - logprobs_N))
    return (advantages_N >= 0) | (rows.spread(fall_S) <= kl_max)


def entropy_threshold(entropies_N: np.ndarray, fraction: float) -> float:
    """The entropy that `fraction` of a step's trained tokens reach or exceed: https://arxiv.org/abs/2506.01939"""
    return float(np.quantile(entropies_N, 1 - fraction))
