// The gradient of gated_norm.cu with respect to `x` and `gate`, of the same T and SIZE, given that of `y`.
#include "pack.cuh"

extern "C" __global__ void gated_norm_gradient(const T* x, const T* gate, const T* weight, const T* slopes, T* of_x,
                                               T* of_gate, int heads, float eps) {
  using P = Pack<T>;
  constexpr int VECTORS = SIZE / P::size, CHUNKS = (VECTORS + 31) / 32;
  const int64_t head = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (head >= heads) return;
  float values[CHUNKS][P::size], of_normed[CHUNKS][P::size];  // of_normed: of the norm before its weight
  float squares = 0.0f, products = 0.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int vector = c * 32 + lane;
    if (vector >= VECTORS) continue;
    const P of_head = reinterpret_cast<const P*>(x + head * SIZE)[vector];
    const P gates = reinterpret_cast<const P*>(gate + head * SIZE)[vector];
    const P own = reinterpret_cast<const P*>(slopes + head * SIZE)[vector];
    const P factors = reinterpret_cast<const P*>(weight)[vector];
#pragma unroll
    for (int j = 0; j < P::size; j++) {
      const float open = float(gates.values[j]);
      values[c][j] = float(of_head.values[j]);
      of_normed[c][j] = float(own.values[j]) * float(factors.values[j]) * (open / (1.0f + expf(-open)));
      squares += values[c][j] * values[c][j], products += values[c][j] * of_normed[c][j];
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, step);
    products += __shfl_xor_sync(0xffffffffu, products, step);
  }
  const float scale = rsqrtf(squares / SIZE + eps), along = products / SIZE * scale * scale;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int vector = c * 32 + lane;
    if (vector >= VECTORS) continue;
    const P gates = reinterpret_cast<const P*>(gate + head * SIZE)[vector];
    const P own = reinterpret_cast<const P*>(slopes + head * SIZE)[vector];
    const P factors = reinterpret_cast<const P*>(weight)[vector];
    P result, result_of_gate;
#pragma unroll
    for (int j = 0; j < P::size; j++) {
      const float open = float(gates.values[j]), share = 1.0f / (1.0f + expf(-open));
      const float normed = values[c][j] * scale * float(factors.values[j]);
      result.values[j] = T(scale * (of_normed[c][j] - along * values[c][j]));
      result_of_gate.values[j] = T(float(own.values[j]) * normed * share * (1.0f + open * (1.0f - share)));
    }
    reinterpret_cast<P*>(of_x + head * SIZE)[vector] = result;
    reinterpret_cast<P*>(of_gate + head * SIZE)[vector] = result_of_gate;
  }
}
