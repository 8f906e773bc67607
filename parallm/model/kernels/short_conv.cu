// A convolution of a few tokens in which each channel is by itself; see short_conv.py.
// Inputs `x` (any number of tokens, C), `weight` (C, K), `sources` (M, K): the token of x at each place of the window of
// an output, -1 for none, whose output is zero where its last one is none. Output `y` (M, C).
// T type. BIASED: there is `bias` (C). A thread takes a vector of channels of TOKENS outputs.
#include "pack.cuh"

extern "C" __global__ void short_conv(const T* x, const T* weight,
#if BIASED
    const T* bias,
#endif
    const int* sources, T* y, int tokens) {
  using P = Pack<T>;
  constexpr int VECTORS = C / P::size;
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int vector = index % VECTORS;
  const int64_t first = index / VECTORS * TOKENS;
  if (first >= tokens) return;
  float factors[K * P::size];
#pragma unroll
  for (int i = 0; i < K; i++) {
    const P part = reinterpret_cast<const P*>(weight)[vector * K + i];
#pragma unroll
    for (int j = 0; j < P::size; j++) factors[i * P::size + j] = float(part.values[j]);
  }
  for (int64_t token = first; token < min(first + TOKENS, int64_t(tokens)); token++) {
    float sums[P::size] = {};
#pragma unroll
    for (int i = 0; i < K; i++) {
      const int source = sources[token * K + i];
      if (source < 0) continue;
      const P values = reinterpret_cast<const P*>(x)[int64_t(source) * VECTORS + vector];
#pragma unroll
      for (int j = 0; j < P::size; j++) sums[j] += float(values.values[j]) * factors[j * K + i];
    }
    P result;
#pragma unroll
    for (int j = 0; j < P::size; j++) {
#if BIASED
      if (sources[token * K + K - 1] >= 0) sums[j] += float(bias[vector * P::size + j]);
#endif
      result.values[j] = T(sums[j]);
    }
    reinterpret_cast<P*>(y)[token * VECTORS + vector] = result;
  }
}
