// The residual stream after a sublayer, and its RMSNorm; see add_norm.py.
// Inputs `y` (S, B, H) of type Y, parts of the sublayer's output that are still to be added up, the stream `other` (B, H)
// before it, `weight` (H) of the norm. Outputs `sums` (B, H), rounded as MLX's sum, and `normed` (B, H).
// T type of all arrays but the parts, SPLITS parts, SIZE of H; THREADS and CHUNKS vectors of a thread are those of MLX's
// kernel, so that sums of squares have its order.
#include "pack.cuh"
#include "row_scale.cuh"

extern "C" __global__ void add_norm(const Y* y, const T* other, const T* weight, T* sums, T* normed, float eps,
                                    int rows) {
  using P = Pack<T>;
  struct alignas(16) Given {
    Y values[P::size];
  };
  const int64_t row = blockIdx.x;
  P stream[CHUNKS];
  float squares = 0.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int start = (c * THREADS + threadIdx.x) * P::size;
    if (start < SIZE) {
      Given given[SPLITS];
#pragma unroll
      for (int s = 0; s < SPLITS; s++)
        given[s] = *reinterpret_cast<const Given*>(y + (int64_t(s) * rows + row) * SIZE + start);
      const P before = *reinterpret_cast<const P*>(other + row * SIZE + start);
#pragma unroll
      for (int j = 0; j < P::size; j++) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < SPLITS; s++) sum += float(given[s].values[j]);
        stream[c].values[j] = T(sum + float(before.values[j]));
      }
      *reinterpret_cast<P*>(sums + row * SIZE + start) = stream[c];
    } else {
#pragma unroll
      for (int j = 0; j < P::size; j++) stream[c].values[j] = T(0.0f);
    }
#pragma unroll
    for (int j = 0; j < P::size; j++) {
      const float value = float(stream[c].values[j]);
      squares += value * value;
    }
  }
  const float scale = row_scale(squares, eps);
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int start = (c * THREADS + threadIdx.x) * P::size;
    if (start >= SIZE) break;
    const P factors = *reinterpret_cast<const P*>(weight + start);
    P values;
#pragma unroll
    for (int j = 0; j < P::size; j++)
      values.values[j] = T(float(factors.values[j]) * float(T(float(stream[c].values[j]) * scale)));
    *reinterpret_cast<P*>(normed + row * SIZE + start) = values;
  }
}
