// The RMS norm of each head, times `weight` (SIZE) and silu of `gate`; see gated_norm.py.
// `x`, `gate` and `y` are (N, SIZE) of type T. A warp takes a head.
#include "pack.cuh"

extern "C" __global__ void gated_norm(const T* x, const T* gate, const T* weight, T* y, int heads, float eps) {
  using P = Pack<T>;
  constexpr int VECTORS = SIZE / P::size, CHUNKS = (VECTORS + 31) / 32;
  const int64_t head = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (head >= heads) return;
  P values[CHUNKS];
  float squares = 0.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    if (c * 32 + lane >= VECTORS) continue;
    values[c] = reinterpret_cast<const P*>(x + head * SIZE)[c * 32 + lane];
#pragma unroll
    for (int j = 0; j < P::size; j++) squares += float(values[c].values[j]) * float(values[c].values[j]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  const float scale = rsqrtf(squares / SIZE + eps);
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int vector = c * 32 + lane;
    if (vector >= VECTORS) continue;
    const P factors = reinterpret_cast<const P*>(weight)[vector];
    const P gates = reinterpret_cast<const P*>(gate + head * SIZE)[vector];
    P result;
#pragma unroll
    for (int j = 0; j < P::size; j++) {
      const float normed = float(T(float(factors.values[j]) * float(T(float(values[c].values[j]) * scale))));
      const float open = float(gates.values[j]);
      result.values[j] = T(open / (1.0f + expf(-open)) * normed);
    }
    reinterpret_cast<P*>(y + head * SIZE)[vector] = result;
  }
}
