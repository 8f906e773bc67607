// What the gated delta rule takes, from a layer's projections; see delta_inputs.py.
// Inputs `x` (tokens, CHANNELS), columns of queries, keys and values; `weight` (CHANNELS, K) of the convolution and
// `sources` (tokens, K) as in short_conv.cu; `a`, `b` (tokens, HEADS), `rates` A_log and `shifts` dt_bias (HEADS);
// `scales`: what is added to mean squares, the factor of queries, and that of keys. Outputs `q`, `k` (tokens,
// KEY_HEADS, DK), `v` (tokens, HEADS, DV), `log_a` and `strengths` (tokens, HEADS).
#include "delta_inputs.cuh"

template <int SIZE, bool IS_NORMED>
__device__ __forceinline__ void put_head(const Convolution<SIZE>& convolution, T* to, int stride, int first, int end,
                                         float eps, float scale) {
  for (int token = first; token < end; token++) {
    float sums[SIZE], squares = 0.0f;
    convolution(token, sums);
#pragma unroll
    for (int j = 0; j < SIZE; j++) {
      sums[j] = float(T(sums[j] * sigmoid(sums[j])));
      squares += sums[j] * sums[j];
    }
    const float norm = IS_NORMED ? rsqrtf(of_warp(squares) / (SIZE * 32) + eps) : 1.0f;
    Few<SIZE> few;
#pragma unroll
    for (int j = 0; j < SIZE; j++) few.values[j] = IS_NORMED ? T(scale * float(T(sums[j] * norm))) : T(sums[j]);
    *reinterpret_cast<Few<SIZE>*>(to + int64_t(token) * stride) = few;
  }
}

extern "C" __global__ void delta_inputs(const T* x, const T* weight, const int* sources, const T* a, const T* b,
                                        const RATE* rates, const SHIFT* shifts, const float* scales, T* q, T* k, T* v,
                                        float* log_a, T* strengths, int tokens) {
  const int lane = threadIdx.x % 32;
  visit_units(tokens, [&](int unit, int first, int end) {
    if (unit == UNITS - 1) {
      for (int i = first * HEADS + lane; i < end * HEADS; i += 32) {
        const float shifted = float(a[i]) + float(shifts[i % HEADS]);
        const float softplus = (shifted > 0.0f ? shifted : 0.0f) + log1pf(expf(-fabsf(shifted)));
        log_a[i] = -expf(float(rates[i % HEADS])) * softplus;
        strengths[i] = T(sigmoid(float(b[i])));
      }
    } else if (unit < 2 * KEY_HEADS) {
      constexpr int SIZE = DK / 32;
      const int head = unit % KEY_HEADS, channel = lane * SIZE;
      put_head<SIZE, true>(Convolution<SIZE>(x, weight, sources, unit * DK + channel),
                           (unit < KEY_HEADS ? q : k) + head * DK + channel, KEY_CHANNELS, first, end, scales[0],
                           scales[unit < KEY_HEADS ? 1 : 2]);
    } else {
      constexpr int SIZE = DV / 32;
      const int channel = (unit - 2 * KEY_HEADS) * DV + lane * SIZE;
      put_head<SIZE, false>(Convolution<SIZE>(x, weight, sources, 2 * KEY_CHANNELS + channel), v + channel, HEADS * DV,
                            first, end, 0.0f, 1.0f);
    }
  });
}
