"""Off-policy corrections: weights of tokens without a gradient, and sums over sequences. `policy_loss` calls it.

Axes: S sequences, N tokens of any of them.
"""

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from parallm.learner.settings import Correction


@dataclass(frozen=True, slots=True)
class SequenceSums:
    """The trained tokens of each sequence, as a bool matrix: a scatter sums in no fixed order on a GPU."""

    members_SN: mx.array

    def sums(self, values_N: mx.array) -> mx.array:
        """(S,). Values of other tokens do not matter, even if they are not finite."""
        return mx.where(self.members_SN, values_N[None], 0.0).sum(axis=1)

    def means(self, values_N: mx.array) -> mx.array:
        """(S,); 0 for a sequence without trained tokens."""
        return self.sums(values_N) / mx.maximum(self.members_SN.sum(axis=1), 1)

    def broadcast(self, values_S: mx.array) -> mx.array:
        """The value of each token's sequence, (N,); 0 at tokens that are not trained."""
        return mx.where(self.members_SN, values_S[:, None], 0.0).sum(axis=0)


def sequence_sums(rows_N: mx.array, trained_N: mx.array, num_rows: int) -> SequenceSums:
    """`rows_N`: each token's sequence. `trained_N`: True if the token counts."""
    return SequenceSums((rows_N[None] == mx.arange(num_rows)[:, None]) & trained_N[None])


def importance_weights(
    old_N: mx.array,
    behaviour_N: mx.array,
    rows: SequenceSums,
    *,
    correction: Correction,
    ratio_min: float,
    ratio_max: float,
) -> mx.array:
    """The learner's probability over the sampler's, per token or sequence, (N,).

    The two absolute limits truncate (https://fengyao.notion.site/off-policy-rl) or mask it (IcePop,
    https://arxiv.org/abs/2510.18855).
    """
    log_weight_N = old_N - behaviour_N
    if correction in ("sequence_truncate", "sequence_mask"):
        log_weight_N = rows.broadcast(rows.sums(log_weight_N))
    if correction in ("token_truncate", "sequence_truncate"):
        weight_N = mx.maximum(mx.exp(mx.minimum(log_weight_N, math.log(ratio_max))), ratio_min)
    else:
        weight_N = mx.exp(log_weight_N)
        weight_N = mx.where((weight_N < ratio_min) | (weight_N > ratio_max), 0.0, weight_N)  # NaN stays NaN
    return mx.stop_gradient(weight_N)


def keep_sequence_mask(
    logprobs_N: mx.array, behaviour_N: mx.array, advantages_N: mx.array, rows: SequenceSums, kl_max: float
) -> mx.array:
    """False (N,) for bad completions whose mean log-prob fell by more than `kl_max`.

    Off-policy sequence masking of DeepSeek-V3.2: https://arxiv.org/abs/2512.02556
    """
    fall_S = rows.means(mx.stop_gradient(behaviour_N - logprobs_N))
    return (advantages_N >= 0) | (rows.broadcast(fall_S) <= kl_max)


def entropy_threshold(entropies_N: np.ndarray, fraction: float) -> float:
    """The entropy that `fraction` of a step's trained tokens reach or exceed: https://arxiv.org/abs/2506.01939"""
    return float(np.quantile(entropies_N, 1 - fraction))
