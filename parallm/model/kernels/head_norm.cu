// RMSNorm of each head of rows of one token; see head_norm.py.
// `source` of which row b's heads begin at `start + b * pitch`, `weight` (D), output `normed` (B, heads, D). T type, SIZE of
// a head. A warp has a head, and its first threads a vector of it, so that squares are added in MLX's order.
#include "dependent.cuh"
#include "pack.cuh"

extern "C" __global__ void head_norm(const T* source, const T* weight, T* normed, float eps, int rows, int heads, int start,
                                     int pitch) {
  wait_for_inputs();
  using P = Pack<T>;
  const int head = (blockIdx.x * blockDim.x + threadIdx.x) / 32, at = threadIdx.x % 32 * P::size;
  if (head >= rows * heads) return;
  P values, factor;
  float squares = 0.0f;
  if (at < SIZE) {
    values = *reinterpret_cast<const P*>(source + start + int64_t(head / heads) * pitch + head % heads * SIZE + at);
    factor = *reinterpret_cast<const P*>(weight + at);
#pragma unroll
    for (int j = 0; j < P::size; j++) squares += float(values.values[j]) * float(values.values[j]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  if (at >= SIZE) return;
  const float scale = rsqrtf(squares / SIZE + eps);
#pragma unroll
  for (int j = 0; j < P::size; j++)
    values.values[j] = T(float(factor.values[j]) * float(T(float(values.values[j]) * scale)));
  *reinterpret_cast<P*>(normed + int64_t(head) * SIZE + at) = values;
}
