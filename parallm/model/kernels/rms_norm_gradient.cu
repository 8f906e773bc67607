// The gradient of an RMS norm (N, SIZE) of T times a weight with respect to what is normed, given that of the result.
// ROW_THREADS threads have a row: a warp, several of which make a block, or a block.
#include "pack.cuh"

extern "C" __global__ void rms_norm_gradient(const T* x, const T* weight, const T* slopes, T* of_x, int rows,
                                             float eps) {
  using P = Pack<T>;
  constexpr int VECTORS = SIZE / P::size, CHUNKS = (VECTORS + ROW_THREADS - 1) / ROW_THREADS;
  const int64_t row = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / ROW_THREADS;
  const int lane = threadIdx.x % ROW_THREADS;
  if (row >= rows) return;
  float values[CHUNKS][P::size], of_normed[CHUNKS][P::size];  // of_normed: of the norm before its weight
  float squares = 0.0f, products = 0.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int vector = c * ROW_THREADS + lane;
    if (vector >= VECTORS) continue;
    const P of_row = reinterpret_cast<const P*>(x + row * SIZE)[vector];
    const P slope = reinterpret_cast<const P*>(slopes + row * SIZE)[vector];
    const P factors = reinterpret_cast<const P*>(weight)[vector];
#pragma unroll
    for (int j = 0; j < P::size; j++) {
      values[c][j] = float(of_row.values[j]);
      of_normed[c][j] = float(slope.values[j]) * float(factors.values[j]);
      squares += values[c][j] * values[c][j], products += values[c][j] * of_normed[c][j];
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, step);
    products += __shfl_xor_sync(0xffffffffu, products, step);
  }
  if (ROW_THREADS > 32) {
    __shared__ float sums[2][ROW_THREADS / 32];
    if (lane % 32 == 0) sums[0][lane / 32] = squares, sums[1][lane / 32] = products;
    __syncthreads();
    squares = products = 0.0f;
    for (int warp = 0; warp < ROW_THREADS / 32; warp++) squares += sums[0][warp], products += sums[1][warp];
  }
  const float scale = rsqrtf(squares / SIZE + eps), along = products / SIZE * scale * scale;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int vector = c * ROW_THREADS + lane;
    if (vector >= VECTORS) continue;
    P result;
#pragma unroll
    for (int j = 0; j < P::size; j++) result.values[j] = T(scale * (of_normed[c][j] - along * values[c][j]));
    reinterpret_cast<P*>(of_x + row * SIZE)[vector] = result;
  }
}
