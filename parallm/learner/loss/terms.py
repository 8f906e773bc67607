"""Policy terms: the loss of a token for its probability ratio and advantage. `policy_loss` calls them.

All bound the log of the ratio before they exponentiate it, so a clipped ratio too large for float32 has the gradient
zero, not NaN. Axes: N tokens of any completions.
"""

import math

import mlx.core as mx

VESPO_POSITIVE = (2.0, 3.0)
VESPO_NEGATIVE = (3.0, 2.0)
"""Shape (k, lambda) of VESPO's weight for advantages of zero and more, and below."""
VESPO_LOG_RATIO_MIN, VESPO_LOG_RATIO_MAX = math.log(1e-8), 20.0
"""Absolute limits of a sequence's log ratio, as in VESPO's paper."""


def ppo(log_ratio_N: mx.array, advantages_N: mx.array, bounds_N: tuple[mx.array, mx.array]) -> mx.array:
    """Ratio x advantage, constant outside of `bounds_N`: https://arxiv.org/abs/1707.06347"""
    return -mx.exp(mx.clip(log_ratio_N, *bounds_N)) * advantages_N


def ppo_bounds(
    advantages_N: mx.array, *, clip_low: float, clip_high: float, dual_clip_ratio_max: float | None
) -> tuple[mx.array, mx.array]:
    """The smallest and largest log ratio (N,) with a gradient.

    The ratio of good tokens is bounded by 1 + `clip_high`, that of bad tokens by 1 - `clip_low`. The dual clip also
    bounds bad tokens from above (https://arxiv.org/abs/1912.09729).
    """
    low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    dual = math.inf if dual_clip_ratio_max is None else math.log(dual_clip_ratio_max)
    return mx.where(advantages_N > 0, -math.inf, low), mx.where(advantages_N < 0, dual, math.log1p(clip_high))


def reinforce(log_ratio_N: mx.array, advantages_N: mx.array) -> mx.array:
    """Ratio x advantage without bounds: the policy gradient with importance weights."""
    return -mx.exp(log_ratio_N) * advantages_N


def likelihood(logprobs_N: mx.array, advantages_N: mx.array) -> mx.array:
    """Log-prob x advantage; supervised training if all advantages are 1."""
    return -logprobs_N * advantages_N


def cispo(logprobs_N: mx.array, log_ratio_N: mx.array, advantages_N: mx.array, ratio_max: float) -> mx.array:
    """Every token has a gradient, weighted by its ratio up to `ratio_max`: https://arxiv.org/abs/2506.13585"""
    ratio_N = mx.exp(mx.minimum(log_ratio_N, math.log(ratio_max)))
    return -mx.stop_gradient(ratio_N) * advantages_N * logprobs_N


def trust_region(log_ratio_N: mx.array, advantages_N: mx.array, dropped_N: mx.array) -> mx.array:
    """Ratio x advantage; zero for dropped tokens."""
    ratio_N = mx.exp(mx.where(dropped_N, 0.0, log_ratio_N))
    return -mx.where(dropped_N, 0.0, ratio_N) * advantages_N


def outside_trust_region(
    rise_N: mx.array, advantages_N: mx.array, *, fall_max: float, rise_max: float, both_ways: bool
) -> mx.array:
    """True (N,) for tokens whose probability rose or fell too much.

    DPPO bounds the side that the advantage pushes to (binary total variation, https://arxiv.org/abs/2602.04879);
    prime-rl's IPO bounds both (`both_ways`).
    """
    above_N, below_N = rise_N > rise_max, rise_N < -fall_max
    if both_ways:
        return above_N | below_N
    return mx.where(advantages_N > 0, above_N, below_N)


def sapo(
    log_ratio_N: mx.array, advantages_N: mx.array, *, temperature_positive: float, temperature_negative: float
) -> mx.array:
    """A soft gate in place of the clip; its slope at ratio 1 is 1: https://arxiv.org/abs/2511.20347"""
    temperature_N = mx.where(advantages_N > 0, temperature_positive, temperature_negative)
    gate_N = mx.sigmoid(temperature_N * (mx.exp(log_ratio_N) - 1))
    return -advantages_N * gate_N * 4 / temperature_N


def vespo(logprobs_N: mx.array, sequence_log_ratio_N: mx.array, advantages_N: mx.array) -> mx.array:
    """Gradients weighted by ratio^k exp(lambda (1 - ratio)) of the whole sequence: https://arxiv.org/abs/2602.10693"""
    log_ratio_N = mx.clip(sequence_log_ratio_N, VESPO_LOG_RATIO_MIN, VESPO_LOG_RATIO_MAX)
    is_good_N = advantages_N >= 0
    power_N, decay_N = (
        mx.where(is_good_N, positive, negative)
        for positive, negative in zip(VESPO_POSITIVE, VESPO_NEGATIVE, strict=True)
    )
    weight_N = mx.exp(power_N * log_ratio_N + decay_N * (1 - mx.exp(log_ratio_N)))
    return -mx.stop_gradient(weight_N) * advantages_N * logprobs_N
