"""Log-probs and entropies of given tokens, and the gradient from them back to the logits.

The definition is `logprobs.softmax_of`. With MLX's CUDA build two kernels stand in for it: one reads each row of logits
once, the other writes their gradient in their own dtype. Operations of MLX would keep four to six float32 arrays of
that size at a time. Arithmetic is float32 in both.

Axes: N tokens, V vocabulary.
"""

from typing import Protocol

import mlx.core as mx

from parallm.model.kernels.cuda import Kernel, kernel, on_cuda
from parallm.model.logprobs import MIN_FLOAT, Softmax, softmax_of


class TokenScores(Protocol):
    """Of one token of each row, after temperature; float32."""

    logprobs_N: mx.array
    entropies_N: mx.array

    def gradient(self, gradient_N: mx.array, entropy_gradient_N: mx.array | None) -> mx.array:
        """With respect to the logits (N, V), given those with respect to log-probs and entropies."""
        ...


def token_scores(logits_NV: mx.array, temperature_N: mx.array, tokens_N: mx.array) -> TokenScores:
    """Rows with temperature 0 (greedy) count as temperature 1."""
    divisor_N = mx.where(temperature_N > 0, temperature_N, 1.0).astype(mx.float32)
    if on_cuda():
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
        found_NV = self._softmax.exponentials_NV * (-scale_N / self._softmax.sums_N)[:, None]
        found_NV = found_NV.at[mx.arange(len(scale_N)), self._tokens_N].add(scale_N)
        if entropy_gradient_N is None:
            return found_NV
        return found_NV + _entropy_gradient(self._softmax, entropy_gradient_N / self._divisor_N)


def _entropy_gradient(softmax: Softmax, gradient_N: mx.array) -> mx.array:
    """Gradient of each row's entropy with respect to its scaled logits, -p (log p + entropy), times `gradient_N`."""
    logprobs_NV = mx.maximum(softmax.scaled_NV - softmax.logsumexp_N[:, None], MIN_FLOAT)
    surprise_NV = logprobs_NV + softmax.entropies()[:, None]
    return -gradient_N[:, None] * softmax.probabilities() * surprise_NV


class _FusedScores:
    def __init__(self, logits_NV: mx.array, divisor_N: mx.array, tokens_N: mx.array) -> None:
        self._inputs = [logits_NV, divisor_N, tokens_N]
        rows = logits_NV.shape[0]
        self.logprobs_N, self.entropies_N, self._logsumexp_N = _scores_kernel()(
            inputs=self._inputs,
            template=_template(logits_NV),
            grid=(rows * ROW_THREADS, 1, 1),
            threadgroup=(ROW_THREADS, 1, 1),
            output_shapes=[(rows,)] * 3,
            output_dtypes=[mx.float32] * 3,
        )

    def gradient(self, gradient_N: mx.array, entropy_gradient_N: mx.array | None) -> mx.array:
        logits_NV = self._inputs[0]
        rows, columns = logits_NV.shape
        of_entropies_N = mx.zeros((rows,)) if entropy_gradient_N is None else entropy_gradient_N
        given = [self._logsumexp_N, self.entropies_N, gradient_N, of_entropies_N]
        (found_NV,) = _gradient_kernel()(
            inputs=[*self._inputs, *given],
            template=_template(logits_NV),
            grid=(-(-columns // GRADIENT_THREADS) * GRADIENT_THREADS, min(rows, MAX_BLOCKS), 1),
            threadgroup=(GRADIENT_THREADS, 1, 1),
            output_shapes=[logits_NV.shape],
            output_dtypes=[logits_NV.dtype],
        )
        return found_NV


ROW_THREADS = 512  # of the block that reads a row
GRADIENT_THREADS = 256
MAX_BLOCKS = 65_535  # along the grid's second axis, by CUDA; a block takes several rows where there are more


def _template(logits_NV: mx.array) -> list[tuple[str, object]]:
    return [("T", logits_NV.dtype), ("V", logits_NV.shape[1])]


def _scores_kernel() -> Kernel:
    return kernel("token_scores", ("logits", "divisor", "tokens"), ("logprobs", "entropies", "logsumexp"), _SCORES)


def _gradient_kernel() -> Kernel:
    inputs = ("logits", "divisor", "tokens", "logsumexp", "entropies", "gradient", "entropy_gradient")
    return kernel("token_scores_gradient", inputs, ("found",), _GRADIENT)


_SCORES = """
  // The largest so far, and sums of exp(value - largest) and of that times the value; -INFINITY adds nothing to them.
  __shared__ float largests[32], sums[32], products[32];
  int64_t row = blockIdx.x;
  const T* values = logits + row * V;
  float scale = 1.0f / divisor[row], largest = -INFINITY, sum = 0.0f, product = 0.0f;
  for (int i = threadIdx.x; i < V; i += blockDim.x) {
    float value = float(values[i]) * scale;
    if (value > largest) {
      float shrunk = expf(largest - value);
      sum *= shrunk;
      product *= shrunk;
      largest = value;
    }
    if (value != -INFINITY) {
      float e = expf(value - largest);
      sum += e;
      product += e * value;
    }
  }
  auto merge = [&](float other_largest, float other_sum, float other_product) {
    float both = fmaxf(largest, other_largest);
    if (both == -INFINITY) return;
    float mine = expf(largest - both), others = expf(other_largest - both);
    sum = sum * mine + other_sum * others;
    product = product * mine + other_product * others;
    largest = both;
  };
  for (int step = 16; step > 0; step /= 2)
    merge(__shfl_down_sync(0xffffffff, largest, step), __shfl_down_sync(0xffffffff, sum, step),
          __shfl_down_sync(0xffffffff, product, step));
  int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
    largests[warp] = largest;
    sums[warp] = sum;
    products[warp] = product;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int other = 1; other < blockDim.x / 32; other++) merge(largests[other], sums[other], products[other]);
    float all = largest + logf(sum);
    logsumexp[row] = all;
    logprobs[row] = float(values[tokens[row]]) * scale - all;
    entropies[row] = all - product / sum;
  }
"""
_GRADIENT = """
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= V) return;
  for (int64_t row = blockIdx.y; row < logits_shape[0]; row += gridDim.y) {
    int64_t place = row * V + column;
    float scale = 1.0f / divisor[row];
    float logprob = float(logits[place]) * scale - logsumexp[row], probability = expf(logprob);
    float chosen = column == tokens[row] ? 1.0f : 0.0f;
    float slope = gradient[row] * (chosen - probability);
    if (entropy_gradient[row] != 0.0f && probability > 0.0f)
      slope -= entropy_gradient[row] * probability * (logprob + entropies[row]);
    found[place] = T(slope * scale);
  }
"""
