"""The loss of a policy update: one pure function over flat arrays. `PolicyGradient` differentiates it.

The loss of a token is its policy term, times correction weights, plus KL, minus the entropy bonus; times its weight in
the step. So the sum over micro-batches does not depend on how a step is cut.
Ratios are bounded before they are exponentiated: a clipped ratio too large for float32 has the gradient zero, not NaN.
Axes: S sequences, N tokens of any of them; a sequence is never cut in two.
"""

import math
from dataclasses import dataclass

import mlx.core as mx

from parallm.learner.loss.objective import Objective
from parallm.learner.settings import KlEstimator

VESPO_POSITIVE = (2.0, 3.0)
VESPO_NEGATIVE = (3.0, 2.0)
"""Shape (k, lambda) of VESPO's weight for advantages of zero and more, and below."""
VESPO_LOG_RATIO_MIN, VESPO_LOG_RATIO_MAX = math.log(1e-8), 20.0
"""Absolute limits of a sequence's log ratio, as in VESPO's paper."""
SAPO_LOG_RATIO_MAX = 80.0
"""The exponential is still a float32, and SAPO's gate has long been 1, with a slope of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Constants of a gradient. Values at tokens of weight zero do not matter, not even NaN."""

    behaviour_N: mx.array
    """Log-probs that the completions were sampled with."""
    advantages_N: mx.array
    weights_N: mx.array
    """Weight of each token in the loss of the whole step (`token_weight`); 0 if it is not trained on."""
    rows_N: mx.array
    """Sequence of each token, int32."""
    num_rows: int
    old_N: mx.array | None = None
    """Log-probs at the start of the step, the denominator of ratios; None: `behaviour_N`."""
    reference_N: mx.array | None = None
    """Log-probs of the reference policy of KL in the loss; needed with such a term."""
    entropy_threshold: float | None = None
    """Tokens of lower entropy are not trained on."""


def objective_loss(logprobs_N: mx.array, entropies_N: mx.array, inputs: LossInputs, objective: Objective) -> mx.array:
    """Scalar loss; its sum over the micro-batches of a step is the step's loss.

    Differentiable in `logprobs_N` and `entropies_N`. NaN if a trained token's log-prob is not finite.
    """
    tokens = _mask_untrained(logprobs_N, entropies_N, inputs)
    log_ratio_N = _log_ratio(tokens, objective)
    loss_N = _policy_term(tokens, log_ratio_N, objective) * _token_factors(tokens, inputs, objective)
    if objective.kl_coefficient > 0 and objective.kl_placement == "loss":
        ratio_N = mx.exp(log_ratio_N) if objective.kl_unbiased else None
        loss_N += objective.kl_coefficient * kl_estimate(
            tokens.logprobs_N, tokens.reference_N, objective.kl_estimator, ratio_N
        )
    if objective.entropy_coefficient > 0:
        loss_N -= objective.entropy_coefficient * tokens.entropies_N
    return (inputs.weights_N * loss_N).sum()


def is_clipped(logprobs_N: mx.array, inputs: LossInputs, objective: Objective) -> mx.array:
    """True (N,) for trained tokens whose gradient the policy term bounds or removes."""
    tokens = _mask_untrained(logprobs_N, logprobs_N, inputs)
    log_ratio_N = _log_ratio(tokens, objective)
    if objective.policy == "ppo":
        low_N, high_N = _ppo_bounds(tokens, objective)
        clipped_N = (log_ratio_N < low_N) | (log_ratio_N > high_N)
    elif objective.policy == "cispo":
        clipped_N = mx.exp(log_ratio_N) > objective.cispo_ratio_max
    elif objective.policy in ("dppo_tv", "ipo"):
        clipped_N = _dropped(tokens, objective)
    else:
        clipped_N = mx.zeros(log_ratio_N.shape, mx.bool_)
    return clipped_N & (inputs.weights_N > 0)


def kl_estimate(
    logprobs_N: mx.array, reference_N: mx.array, estimator: KlEstimator, ratio_N: mx.array | None = None
) -> mx.array:
    """KL(policy, reference) from the log-prob of one sampled token: http://joschu.net/blog/kl-approx.html

    Per token (N,), for tokens that the policy sampled; its gradient is exactly zero where the two agree.

    With `ratio_N`, policy to sampler, it is for tokens that another policy sampled
    (https://arxiv.org/abs/2512.02556, section 3.1).

    k1 has no bias but may be negative. Differentiated plainly it would push all tokens alike, whatever the reference
    says; its gradient here is that of KL itself, and of k2 (https://arxiv.org/abs/2510.01555).
    """
    difference_N = logprobs_N - reference_N
    if estimator == "k1":
        if ratio_N is None:
            ratio_N = mx.exp(logprobs_N - mx.stop_gradient(logprobs_N))
        return ratio_N * mx.stop_gradient(difference_N)
    estimate_N = 0.5 * mx.square(difference_N) if estimator == "k2" else kl_k3(reference_N, logprobs_N)
    return estimate_N if ratio_N is None else ratio_N * estimate_N


def kl_k3(logprobs_N: mx.array, sampler_N: mx.array) -> mx.array:
    """Per token, ratio - 1 - log ratio: never negative. Estimates KL(sampler, policy of `logprobs_N`)."""
    difference_N = logprobs_N - sampler_N
    return mx.exp(difference_N) - 1 - difference_N


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The arrays with zeros at tokens that are not trained on, so that nothing there reaches the loss."""

    logprobs_N: mx.array
    entropies_N: mx.array
    behaviour_N: mx.array
    advantages_N: mx.array
    old_N: mx.array
    reference_N: mx.array
    members_SN: mx.array
    """The trained tokens of each sequence, bool: a scatter sums in no fixed order on a GPU."""

    def sums(self, values_N: mx.array) -> mx.array:
        """Sums over sequences (S,). Values of other tokens do not matter, even if they are not finite."""
        return mx.where(self.members_SN, values_N[None], 0.0).sum(axis=1)

    def means(self, values_N: mx.array) -> mx.array:
        """(S,); 0 for a sequence without trained tokens."""
        return self.sums(values_N) / mx.maximum(self.members_SN.sum(axis=1), 1)

    def broadcast(self, values_S: mx.array) -> mx.array:
        """The value of each token's sequence, (N,); 0 at tokens that are not trained."""
        return mx.where(self.members_SN, values_S[:, None], 0.0).sum(axis=0)


def _mask_untrained(logprobs_N: mx.array, entropies_N: mx.array, inputs: LossInputs) -> _Tokens:
    trained_N = inputs.weights_N > 0

    def masked(values_N: mx.array) -> mx.array:
        # an infinite log-prob is a fault; NaN passes through a clip
        return mx.where(trained_N, mx.where(mx.isfinite(values_N), values_N, mx.nan), 0.0)

    behaviour_N = masked(inputs.behaviour_N)
    return _Tokens(
        logprobs_N=masked(logprobs_N),
        entropies_N=masked(entropies_N),
        behaviour_N=behaviour_N,
        advantages_N=masked(inputs.advantages_N),
        old_N=behaviour_N if inputs.old_N is None else masked(inputs.old_N),
        reference_N=behaviour_N if inputs.reference_N is None else masked(inputs.reference_N),
        members_SN=(inputs.rows_N[None] == mx.arange(inputs.num_rows)[:, None]) & trained_N[None],
    )


def _log_ratio(tokens: _Tokens, objective: Objective) -> mx.array:
    log_ratio_N = tokens.logprobs_N - tokens.old_N
    if objective.policy == "vespo" or objective.ratio == "sequence_sum":
        return tokens.broadcast(tokens.sums(log_ratio_N))
    if objective.ratio == "sequence":
        return tokens.broadcast(tokens.means(log_ratio_N))
    return log_ratio_N


def _policy_term(tokens: _Tokens, log_ratio_N: mx.array, objective: Objective) -> mx.array:
    logprobs_N, advantages_N = tokens.logprobs_N, tokens.advantages_N
    match objective.policy:
        case "ppo":  # https://arxiv.org/abs/1707.06347
            return -mx.exp(mx.clip(log_ratio_N, *_ppo_bounds(tokens, objective))) * advantages_N
        case "reinforce":
            return -mx.exp(log_ratio_N) * advantages_N
        case "likelihood":  # supervised training if all advantages are 1
            return -logprobs_N * advantages_N
        case "cispo":  # every token has a gradient: https://arxiv.org/abs/2506.13585
            ratio_N = mx.exp(mx.minimum(log_ratio_N, math.log(objective.cispo_ratio_max)))
            return -mx.stop_gradient(ratio_N) * advantages_N * logprobs_N
        case "dppo_tv" | "ipo":
            dropped_N = _dropped(tokens, objective)
            ratio_N = mx.exp(mx.where(dropped_N, 0.0, log_ratio_N))
            return -mx.where(dropped_N, 0.0, ratio_N) * advantages_N
        case "sapo":
            return _sapo(log_ratio_N, advantages_N, objective)
        case "vespo":
            return _vespo(logprobs_N, log_ratio_N, advantages_N)


def _ppo_bounds(tokens: _Tokens, objective: Objective) -> tuple[mx.array, mx.array]:
    """The smallest and largest log ratio (N,) with a gradient.

    The ratio of good tokens is bounded by 1 + `clip_high`, that of bad tokens by 1 - `clip_low`. The dual clip also
    bounds bad tokens from above (https://arxiv.org/abs/1912.09729).
    """
    low = math.log1p(-objective.clip_low) if objective.clip_low < 1 else -math.inf
    dual = math.inf if objective.dual_clip_ratio_max is None else math.log(objective.dual_clip_ratio_max)
    high = math.log1p(objective.clip_high)
    return mx.where(tokens.advantages_N > 0, -math.inf, low), mx.where(tokens.advantages_N < 0, dual, high)


def _dropped(tokens: _Tokens, objective: Objective) -> mx.array:
    """True (N,) for tokens whose probability rose or fell too much.

    DPPO bounds the side that the advantage pushes to (binary total variation, https://arxiv.org/abs/2602.04879);
    prime-rl's IPO bounds both.
    """
    rise_N = mx.exp(tokens.logprobs_N) - mx.exp(tokens.old_N)
    above_N, below_N = rise_N > objective.probability_rise_max, rise_N < -objective.probability_fall_max
    return above_N | below_N if objective.policy == "ipo" else mx.where(tokens.advantages_N > 0, above_N, below_N)


def _sapo(log_ratio_N: mx.array, advantages_N: mx.array, objective: Objective) -> mx.array:
    """A soft gate in place of the clip; its slope at ratio 1 is 1: https://arxiv.org/abs/2511.20347"""
    temperature_N = mx.where(advantages_N > 0, objective.sapo_temperature_positive, objective.sapo_temperature_negative)
    gate_N = mx.sigmoid(temperature_N * (mx.exp(mx.minimum(log_ratio_N, SAPO_LOG_RATIO_MAX)) - 1))
    return -advantages_N * gate_N * 4 / temperature_N


def _vespo(logprobs_N: mx.array, sequence_log_ratio_N: mx.array, advantages_N: mx.array) -> mx.array:
    """Gradients weighted by ratio^k exp(lambda (1 - ratio)) of the whole sequence: https://arxiv.org/abs/2602.10693"""
    log_ratio_N = mx.clip(sequence_log_ratio_N, VESPO_LOG_RATIO_MIN, VESPO_LOG_RATIO_MAX)
    power_N, decay_N = (
        mx.where(advantages_N >= 0, positive, negative)
        for positive, negative in zip(VESPO_POSITIVE, VESPO_NEGATIVE, strict=True)
    )
    weight_N = mx.exp(power_N * log_ratio_N + decay_N * (1 - mx.exp(log_ratio_N)))
    return -mx.stop_gradient(weight_N) * advantages_N * logprobs_N


def _token_factors(tokens: _Tokens, inputs: LossInputs, objective: Objective) -> mx.array:
    """Weights of tokens (N,) without a gradient."""
    factor_N = mx.ones(tokens.logprobs_N.shape)
    if objective.off_policy_kl_max is not None:
        # drops bad completions whose mean log-prob fell: sequence masking of https://arxiv.org/abs/2512.02556
        fall_S = tokens.means(mx.stop_gradient(tokens.behaviour_N - tokens.logprobs_N))
        factor_N *= (tokens.advantages_N >= 0) | (tokens.broadcast(fall_S) <= objective.off_policy_kl_max)
    if inputs.entropy_threshold is not None:
        factor_N *= tokens.entropies_N >= inputs.entropy_threshold
    if objective.correction != "none":
        factor_N *= _importance_weights(tokens, objective)
    return factor_N


def _importance_weights(tokens: _Tokens, objective: Objective) -> mx.array:
    """The learner's probability over the sampler's, per token or sequence, (N,).

    The two absolute limits truncate (https://fengyao.notion.site/off-policy-rl) or mask it (IcePop,
    https://arxiv.org/abs/2510.18855).
    """
    ratio_min, ratio_max = objective.correction_ratio_min, objective.correction_ratio_max
    log_weight_N = tokens.old_N - tokens.behaviour_N
    if objective.correction in ("sequence_truncate", "sequence_mask"):
        log_weight_N = tokens.broadcast(tokens.sums(log_weight_N))
    if objective.correction in ("token_truncate", "sequence_truncate"):
        weight_N = mx.maximum(mx.exp(mx.minimum(log_weight_N, math.log(ratio_max))), ratio_min)
    else:
        weight_N = mx.exp(log_weight_N)
        weight_N = mx.where((weight_N < ratio_min) | (weight_N > ratio_max), 0.0, weight_N)  # NaN stays NaN
    return mx.stop_gradient(weight_N)
