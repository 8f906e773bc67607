"""Estimates of KL(policy, reference) from the log-prob of one sampled token: http://joschu.net/blog/kl-approx.html

Axes: N tokens of any completions.
"""

import mlx.core as mx

from parallm.learner.settings import KlEstimator


def kl_estimate(
    logprobs_N: mx.array, reference_N: mx.array, estimator: KlEstimator, ratio_N: mx.array | None = None
) -> mx.array:
    """Per token, for tokens that the policy sampled; its gradient is exactly zero where the two agree.

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
