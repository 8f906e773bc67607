"""The loss of a policy update: one pure function over flat arrays. `PolicyGradient` differentiates it.

The loss of a token is its policy term, times correction weights, plus KL, minus the entropy bonus; times its weight in
the step. So the sum over micro-batches does not depend on how a step is cut.
Axes: S sequences, N tokens of any of them; a sequence is never cut in two.
"""

from dataclasses import dataclass

import mlx.core as mx

from parallm.learner.loss import terms
from parallm.learner.loss.corrections import SequenceSums, importance_weights, keep_sequence_mask, sequence_sums
from parallm.learner.loss.kl import kl_estimate
from parallm.learner.loss.objective import Objective


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
    loss_N = _policy_term(tokens, log_ratio_N, objective) * _token_factors(tokens, objective)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The arrays with zeros at tokens that are not trained on, so that nothing there reaches the loss."""

    logprobs_N: mx.array
    entropies_N: mx.array
    behaviour_N: mx.array
    advantages_N: mx.array
    old_N: mx.array
    reference_N: mx.array
    entropy_threshold: float | None
    rows: SequenceSums


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
        entropy_threshold=inputs.entropy_threshold,
        rows=sequence_sums(inputs.rows_N, trained_N, inputs.num_rows),
    )


def _log_ratio(tokens: _Tokens, objective: Objective) -> mx.array:
    log_ratio_N = tokens.logprobs_N - tokens.old_N
    if objective.policy == "vespo" or objective.ratio == "sequence_sum":
        return tokens.rows.broadcast(tokens.rows.sums(log_ratio_N))
    if objective.ratio == "sequence":
        return tokens.rows.broadcast(tokens.rows.means(log_ratio_N))
    return log_ratio_N


def _policy_term(tokens: _Tokens, log_ratio_N: mx.array, objective: Objective) -> mx.array:
    logprobs_N, advantages_N = tokens.logprobs_N, tokens.advantages_N
    match objective.policy:
        case "ppo":
            return terms.ppo(log_ratio_N, advantages_N, _ppo_bounds(tokens, objective))
        case "reinforce":
            return terms.reinforce(log_ratio_N, advantages_N)
        case "likelihood":
            return terms.likelihood(logprobs_N, advantages_N)
        case "cispo":
            return terms.cispo(logprobs_N, log_ratio_N, advantages_N, objective.cispo_ratio_max)
        case "dppo_tv" | "ipo":
            return terms.trust_region(log_ratio_N, advantages_N, _dropped(tokens, objective))
        case "sapo":
            return terms.sapo(
                log_ratio_N,
                advantages_N,
                temperature_positive=objective.sapo_temperature_positive,
                temperature_negative=objective.sapo_temperature_negative,
            )
        case "vespo":
            return terms.vespo(logprobs_N, log_ratio_N, advantages_N)


def _ppo_bounds(tokens: _Tokens, objective: Objective) -> tuple[mx.array, mx.array]:
    return terms.ppo_bounds(
        tokens.advantages_N,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip_ratio_max=objective.dual_clip_ratio_max,
    )


def _dropped(tokens: _Tokens, objective: Objective) -> mx.array:
    return terms.outside_trust_region(
        mx.exp(tokens.logprobs_N) - mx.exp(tokens.old_N),
        tokens.advantages_N,
        fall_max=objective.probability_fall_max,
        rise_max=objective.probability_rise_max,
        both_ways=objective.policy == "ipo",
    )


def _token_factors(tokens: _Tokens, objective: Objective) -> mx.array:
    factor_N = mx.ones(tokens.logprobs_N.shape)
    if objective.off_policy_kl_max is not None:
        factor_N *= keep_sequence_mask(
            tokens.logprobs_N, tokens.behaviour_N, tokens.advantages_N, tokens.rows, objective.off_policy_kl_max
        )
    if tokens.entropy_threshold is not None:
        factor_N *= tokens.entropies_N >= tokens.entropy_threshold
    if objective.correction != "none":
        factor_N *= importance_weights(
            tokens.old_N,
            tokens.behaviour_N,
            tokens.rows,
            correction=objective.correction,
            ratio_min=objective.correction_ratio_min,
            ratio_max=objective.correction_ratio_max,
        )
    return factor_N
