"""Logits -> log-probabilities, for engine and learner alike, so that they cannot differ.

Axes: N tokens, V vocabulary. All of it is float32, after temperature.
"""

from dataclasses import dataclass

import mlx.core as mx

from parallm.model.exponentials import clipped_exp

MIN_FLOAT = float(mx.finfo(mx.float32).min)


@dataclass(frozen=True, slots=True)
class Softmax:
    """The softmax of each row, in parts: log-probs, probabilities and entropies share one pass of exponentials."""

    scaled_NV: mx.array
    """Logits after temperature."""
    exponentials_NV: mx.array
    """exp(scaled - the row's largest)."""
    sums_N: mx.array
    """Sums of the exponentials."""
    logsumexp_N: mx.array

    def of_rows(self, rows_R: mx.array) -> "Softmax":
        """The softmax of some rows, (R,) indices."""
        return Softmax(
            *(array[rows_R] for array in (self.scaled_NV, self.exponentials_NV, self.sums_N, self.logsumexp_N))
        )

    def probabilities(self) -> mx.array:
        """(N, V)."""
        return self.exponentials_NV / self.sums_N[:, None]

    def logprobs(self, tokens_NK: mx.array) -> mx.array:
        """Log-probabilities of `tokens_NK`, (N, K)."""
        return mx.take_along_axis(self.scaled_NV, tokens_NK, axis=-1) - self.logsumexp_N[:, None]

    def entropies(self) -> mx.array:
        """In nats, (N,). A logit of minus infinity adds nothing."""
        finite_NV = mx.maximum(self.scaled_NV, MIN_FLOAT)  # 0 x -inf would be NaN
        weighted_N = (self.exponentials_NV * finite_NV).sum(axis=-1)
        return self.logsumexp_N - weighted_N / self.sums_N


def softmax_of(logits_NV: mx.array, temperature_N: mx.array) -> Softmax:
    """Softmax of logits divided by the temperature; rows with temperature 0 (greedy) count as temperature 1."""
    divisor_N = mx.where(temperature_N > 0, temperature_N, 1.0).astype(mx.float32)
    scaled_NV = logits_NV.astype(mx.float32) / divisor_N[:, None]
    largest_N1 = scaled_NV.max(axis=-1, keepdims=True)
    exponentials_NV = clipped_exp(scaled_NV - largest_N1)
    sums_N = exponentials_NV.sum(axis=-1)
    return Softmax(scaled_NV, exponentials_NV, sums_N, largest_N1[:, 0] + mx.log(sums_N))


def token_logprobs(logits_NV: mx.array, temperature_N: mx.array, tokens_N: mx.array) -> mx.array:
    """Log-probability of `tokens_N`, (N,)."""
    return softmax_of(logits_NV, temperature_N).logprobs(tokens_N[:, None])[:, 0]
