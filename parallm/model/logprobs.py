"""The one place where logits become log-probabilities: engine and learner both call it, so they cannot differ.

Axes: N tokens, V vocabulary. All of it is float32, after temperature.
"""

import mlx.core as mx


def scaled_logits(logits_NV: mx.array, temperature_N: mx.array) -> mx.array:
    """Logits in float32 divided by the temperature; rows with temperature 0 (greedy) count as temperature 1."""
    divisor_N = mx.where(temperature_N > 0, temperature_N, 1.0).astype(mx.float32)
    return logits_NV.astype(mx.float32) / divisor_N[:, None]


def token_logprobs(scaled_NV: mx.array, tokens_N: mx.array) -> mx.array:
    """Log-probability of `tokens_N` under `scaled_logits`, (N,)."""
    chosen_N = mx.take_along_axis(scaled_NV, tokens_N[:, None], axis=-1)[:, 0]
    return chosen_N - mx.logsumexp(scaled_NV, axis=-1)


def entropies(scaled_NV: mx.array, probabilities_NV: mx.array) -> mx.array:
    """Entropy in nats of each row of `scaled_logits`, whose softmax is `probabilities_NV`, (N,)."""
    return mx.logsumexp(scaled_NV, axis=-1) - (probabilities_NV * scaled_NV).sum(axis=-1)
