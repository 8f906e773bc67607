// The gradient of delta_inputs.cu with respect to the outputs of its convolution, and to `a` and `b`, given its inputs
// and the gradients `of_..` of its outputs. Outputs `of_convolved` (tokens, CHANNELS), `of_a` and `of_b`
// (tokens, HEADS).
#include "delta_inputs.cuh"

template <int SIZE, bool IS_NORMED>
__device__ __forceinline__ void put_slopes(const Convolution<SIZE>& convolution, const T* slopes, int stride, T* to,
                                           int first, int end, float eps, float scale) {
  for (int token = first; token < end; token++) {
    float sums[SIZE], own[SIZE], squares = 0.0f, products = 0.0f;
    convolution(token, sums);
    const Few<SIZE> few = *reinterpret_cast<const Few<SIZE>*>(slopes + int64_t(token) * stride);
#pragma unroll
    for (int j = 0; j < SIZE; j++) {
      const float value = float(T(sums[j] * sigmoid(sums[j])));
      own[j] = float(few.values[j]);
      squares += value * value, products += value * own[j];
    }
    if (IS_NORMED) {
      const float norm = rsqrtf(of_warp(squares) / (SIZE * 32) + eps);
      const float along = of_warp(products) / (SIZE * 32) * norm * norm;
#pragma unroll
      for (int j = 0; j < SIZE; j++)
        own[j] = scale * norm * (own[j] - along * float(T(sums[j] * sigmoid(sums[j]))));
    }
    Few<SIZE> result;
#pragma unroll
    for (int j = 0; j < SIZE; j++) {
      const float open = sigmoid(sums[j]);
      result.values[j] = T(own[j] * open * (1.0f + sums[j] * (1.0f - open)));
    }
    *reinterpret_cast<Few<SIZE>*>(to + int64_t(token) * CHANNELS) = result;
  }
}

extern "C" __global__ void delta_inputs_gradient(
    const T* x, const T* weight, const int* sources, const T* a, const T* b, const RATE* rates, const SHIFT* shifts,
    const float* scales, const T* of_q, const T* of_k, const T* of_v, const float* of_log_a, const T* of_strengths,
    T* of_convolved, T* of_a, T* of_b, int tokens) {
  const int lane = threadIdx.x % 32;
  visit_units(tokens, [&](int unit, int first, int end) {
    if (unit == UNITS - 1) {
      for (int i = first * HEADS + lane; i < end * HEADS; i += 32) {
        const float open = sigmoid(float(a[i]) + float(shifts[i % HEADS])), strength = sigmoid(float(b[i]));
        of_a[i] = T(-expf(float(rates[i % HEADS])) * open * of_log_a[i]);
        of_b[i] = T(strength * (1.0f - strength) * float(of_strengths[i]));
      }
    } else if (unit < 2 * KEY_HEADS) {
      constexpr int SIZE = DK / 32;
      const int channel = unit * DK + lane * SIZE, head = unit % KEY_HEADS;
      put_slopes<SIZE, true>(Convolution<SIZE>(x, weight, sources, channel),
                             (unit < KEY_HEADS ? of_q : of_k) + head * DK + lane * SIZE, KEY_CHANNELS,
                             of_convolved + channel, first, end, scales[0], scales[unit < KEY_HEADS ? 1 : 2]);
    } else {
      constexpr int SIZE = DV / 32;
      const int channel = (unit - 2 * KEY_HEADS) * DV + lane * SIZE;
      put_slopes<SIZE, false>(Convolution<SIZE>(x, weight, sources, 2 * KEY_CHANNELS + channel), of_v + channel,
                              HEADS * DV, of_convolved + 2 * KEY_CHANNELS + channel, first, end, 0.0f, 1.0f);
    }
  });
}
