// The gradient of short_conv.cu with respect to `x`, of the same T, C, K and TOKENS.
// Token n of x is read at places `readers[starts[n]]` up to those of the next one: output m, place i is m K + i.
#include "pack.cuh"

extern "C" __global__ void short_conv_gradient(const T* cotangent, const T* weight, const int* starts, const int* readers,
                                               T* gradient, int tokens) {
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
    for (int at = starts[token]; at < starts[token + 1]; at++) {
      const int output = readers[at] / K, place = readers[at] % K;
      const P values = reinterpret_cast<const P*>(cotangent)[int64_t(output) * VECTORS + vector];
#pragma unroll
      for (int i = 0; i < K; i++)
        if (i == place)
#pragma unroll
          for (int j = 0; j < P::size; j++) sums[j] += float(values.values[j]) * factors[j * K + i];
    }
    P result;
#pragma unroll
    for (int j = 0; j < P::size; j++) result.values[j] = T(sums[j]);
    reinterpret_cast<P*>(gradient)[token * VECTORS + vector] = result;
  }
}
