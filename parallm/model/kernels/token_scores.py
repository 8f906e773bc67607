"""Log-probs and entropies of given tokens, and the gradient from them back to the logits, for the learner.

The definition is `logprobs.softmax_of`. With MLX's CUDA build two kernels stand in for it: one reads each row of logits
once, the other writes their gradient in their own dtype. Operations of MLX would keep four to six float32 arrays of
that size at a time. Arithmetic is float32 in both.

Axes: N tokens, V vocabulary.
"""

from typing import Protocol

import mlx.core as mx

from parallm.model.kernels.cuda import VECTOR_BYTES, has_kernels, kernel
from parallm.model.logprobs import MIN_FLOAT, Softmax, softmax_of

ROW_THREADS = 512  # of the block that reads a row
GRADIENT_THREADS = 256
MAX_BLOCKS = 65_535  # along the grid's second axis, by CUDA; a block takes several rows where there are more


class TokenScores(Protocol):
    """Scores of one token of each row, after temperature; float32."""

    logprobs_N: mx.array
    entropies_N: mx.array

    def gradient(self, gradient_N: mx.array, entropy_gradient_N: mx.array | None) -> mx.array:
        """The gradient with respect to the logits (N, V), given those with respect to log-probs and entropies."""
        ...


def token_scores(logits_NV: mx.array, temperature_N: mx.array, tokens_N: mx.array) -> TokenScores:
    """Rows with temperature 0 (greedy) count as temperature 1."""
    divisor_N = mx.where(temperature_N > 0, temperature_N, 1.0).astype(mx.float32)
    if has_kernels():
        return _FusedScores(logits_NV, divisor_N, tokens_N.astype(mx.int32))
    return _PlainScores(logits_NV, divisor_N, tokens_N)


class _PlainScores:
    def __init__(self, logits_NV: mx.array, divisor_N: mx.array, tokens_N: mx.array) -> None:
        self._softmax = softmax_of(logits_NV, divisor_N)
        self._divisor_N = divisor_N
        self._tokens_N = tokens_N
        self.logprobs_N = self._softmax.logprobs(tokens_N[:, None])[:, 0]
        self.entropies_N = self._softmax.entropies()

    def gradient(self, gradient_N: mx.array, entropy_gradient_N: mx.array | None) -> mx.array:
        """A log-softmax's gradient is (chosen - probabilities) / temperature."""
        scale_N = gradient_N / self._divisor_N
        logits_gradient_NV = self._softmax.exponentials_NV * (-scale_N / self._softmax.sums_N)[:, None]
        logits_gradient_NV = logits_gradient_NV.at[mx.arange(len(scale_N)), self._tokens_N].add(scale_N)
        if entropy_gradient_N is None:
            return logits_gradient_NV
        return logits_gradient_NV + _entropy_gradient(self._softmax, entropy_gradient_N / self._divisor_N)


def _entropy_gradient(softmax: Softmax, gradient_N: mx.array) -> mx.array:
    """Gradient of each row's entropy with respect to its scaled logits, -p (log p + entropy), times `gradient_N`."""
    logprobs_NV = mx.maximum(softmax.scaled_NV - softmax.logsumexp_N[:, None], MIN_FLOAT)
    surprise_NV = logprobs_NV + softmax.entropies()[:, None]
    return -gradient_N[:, None] * softmax.probabilities() * surprise_NV


class _FusedScores:
    def __init__(self, logits_NV: mx.array, divisor_N: mx.array, tokens_N: mx.array) -> None:
        self._inputs = [logits_NV, divisor_N, tokens_N]
        rows, vocabulary = logits_NV.shape
        self._defines = ("T", logits_NV.dtype), ("V", vocabulary)
        self.logprobs_N, self.entropies_N, self._logsumexp_N = kernel("token_scores", self._defines)(
            self._inputs,
            grid=(rows * ROW_THREADS, 1, 1),
            threadgroup=(ROW_THREADS, 1, 1),
            output_shapes=[(rows,)] * 3,
            output_dtypes=[mx.float32] * 3,
        )

    def gradient(self, gradient_N: mx.array, entropy_gradient_N: mx.array | None) -> mx.array:
        logits_NV = self._inputs[0]
        rows, vocabulary = logits_NV.shape
        if entropy_gradient_N is None:
            entropy_gradient_N = mx.zeros((rows,))
        vectors = vocabulary * logits_NV.dtype.size // VECTOR_BYTES + 2  # a row may begin and end within one
        return kernel("token_scores_gradient", self._defines)(
            [*self._inputs, self._logsumexp_N, self.entropies_N, gradient_N, entropy_gradient_N],
            [rows],
            grid=(-(-vectors // GRADIENT_THREADS) * GRADIENT_THREADS, min(rows, MAX_BLOCKS), 1),
            threadgroup=(GRADIENT_THREADS, 1, 1),
            output_shapes=[logits_NV.shape],
            output_dtypes=[logits_NV.dtype],
        )[0]
