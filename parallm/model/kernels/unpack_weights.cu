// Weights from numbers of BITS (4 or 8) bits as MLX packs them, the lowest bits first: number x scale + bias, where GROUP
// numbers share both; in float32. T type. A thread has 8 numbers.
#include "dependent.cuh"
#include "pack.cuh"

extern "C" __global__ void unpack_weights(const uint32_t* packed, const T* scales, const T* biases, T* weights,
                                          int places) {
  wait_for_inputs();
  using P = Pack<T>;
  constexpr int NUMBERS = 8, OF_WORD = 32 / BITS, WORDS = NUMBERS / OF_WORD;
  const int64_t place = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, group = place * NUMBERS / GROUP;
  if (place >= places) return;
  const float scale = float(scales[group]), bias = float(biases[group]);
  P vectors[NUMBERS / P::size];
#pragma unroll
  for (int i = 0; i < NUMBERS; i++) {
    const uint32_t number = packed[place * WORDS + i / OF_WORD] >> i % OF_WORD * BITS & (1u << BITS) - 1;
    vectors[i / P::size].values[i % P::size] = T(float(number) * scale + bias);
  }
#pragma unroll
  for (int i = 0; i < NUMBERS / P::size; i++) reinterpret_cast<P*>(weights)[place * (NUMBERS / P::size) + i] = vectors[i];
}
