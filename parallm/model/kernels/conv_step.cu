// One token of a causal convolution in which each channel is by itself, and silu of it; see conv_step.py.
// Inputs: the token's row b at `x + start + b * pitch`, `state` (B, K - 1, C) with the tokens before it, `weight` (C, K).
// Outputs `y` (B, C), and `next` (B, K - 1, C), the state after the token.
// T type of all, K width, C channels. BIASED: there is `bias` (C). SILU: or else the sums themselves.
#include "pack.cuh"

extern "C" __global__ void conv_step(const T* x, const T* state, const T* weight,
#if BIASED
    const T* bias,
#endif
    T* y, T* next, int rows, int start, int pitch) {
  using P = Pack<T>;
  constexpr int VECTORS = C / P::size;
  // A thread takes a vector of channels of a row
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= int64_t(rows) * VECTORS) return;
  const int64_t row = index / VECTORS;
  const int vector = index % VECTORS;
  const P* before = reinterpret_cast<const P*>(state) + row * (K - 1) * VECTORS + vector;
  P* after = reinterpret_cast<P*>(next) + row * (K - 1) * VECTORS + vector;
  P tokens[K], factors[K];
#pragma unroll
  for (int i = 0; i < K - 1; i++) tokens[i] = before[i * VECTORS];
  tokens[K - 1] = reinterpret_cast<const P*>(x + start + row * pitch)[vector];
#pragma unroll
  for (int i = 0; i < K; i++) factors[i] = reinterpret_cast<const P*>(weight)[vector * K + i];
#pragma unroll
  for (int i = 0; i < K - 1; i++) after[i * VECTORS] = tokens[i + 1];
  P result;
#pragma unroll
  for (int j = 0; j < P::size; j++) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < K; i++) {
      const int place = j * K + i;
      sum += float(tokens[i].values[j]) * float(factors[place / P::size].values[place % P::size]);
    }
#if BIASED
    sum += float(bias[vector * P::size + j]);
#endif
    result.values[j] = T(sum);
#if SILU
    const float wide = float(result.values[j]);
    result.values[j] = T(wide / (1.0f + expf(-wide)));
#endif
  }
  reinterpret_cast<P*>(y)[index] = result;
}
