// The gradient from log-probabilities and entropies of token_scores.cu back to the logits. A thread has a vector of a
// row, or a part of one where the row begins or ends.
#include "pack.cuh"

extern "C" __global__ void token_scores_gradient(const T* logits, const float* divisor, const int* tokens,
                                                 const float* logsumexp, const float* entropies, const float* gradient,
                                                 const float* entropy_gradient, T* found, int rows) {
  using P = Pack<T>;
  const int place = blockIdx.x * blockDim.x + threadIdx.x;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const T* from = logits + row * V;
    T* to = found + row * V;
    const int skipped = int(reinterpret_cast<uintptr_t>(to) % sizeof(P) / sizeof(T));
    const int begin = place * P::size - skipped;
    if (begin >= V) continue;
    const float scale = 1.0f / divisor[row], whole = logsumexp[row], entropy = entropies[row];
    const float slope_of_logprob = gradient[row], slope_of_entropy = entropy_gradient[row];
    const int token = tokens[row];
    auto slope = [&](T value, int column) {
      float logprob = float(value) * scale - whole, probability = expf(logprob);
      float result = slope_of_logprob * ((column == token ? 1.0f : 0.0f) - probability);
      if (slope_of_entropy != 0.0f && probability > 0.0f)
        result -= slope_of_entropy * probability * (logprob + entropy);
      return T(result * scale);
    };
    if (begin >= 0 && begin + P::size <= V && reinterpret_cast<uintptr_t>(from + begin) % sizeof(P) == 0) {
      const P given = *reinterpret_cast<const P*>(from + begin);
      P result;
#pragma unroll
      for (int j = 0; j < P::size; j++) result.values[j] = slope(given.values[j], begin + j);
      *reinterpret_cast<P*>(to + begin) = result;
    } else {
      for (int column = max(begin, 0); column < min(begin + P::size, V); column++)
        to[column] = slope(from[column], column);
    }
  }
}
