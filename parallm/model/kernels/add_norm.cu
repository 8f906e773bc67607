// The residual stream after a sublayer, and its RMSNorm; see add_norm.py.
// Inputs `y` (S, B, H) of type Y, parts of the sublayer's output that are still to be added up, the stream `other` (B, H)
// before it, `weight` (H) of the norm; if HAS_LORA those of expand.cu for one target; if SHRINKS `next_order` as there,
// `next_starts` and `next_factors`, where A (SHRUNK, H) of the only version begins at `next_starts[0]`. Outputs `sums`
// (B, H), rounded as MLX's sum, `normed` (B, H), and if SHRINKS `shrunk` (B, SHRUNK), its products with A, zeros for rows
// without a version.
// T type of all arrays but the parts, SPLITS parts, SIZE of H; THREADS and CHUNKS vectors of a thread are those of MLX's
// kernel, so that sums of squares have its order. K columns of A; SORTED as in expand.cu.
#include "pack.cuh"
#include "row_scale.cuh"

extern "C" __global__ void add_norm(const Y* y, const T* other, const T* weight,
#if HAS_LORA
                                    const float* hidden, const int* order, const int* starts, const T* factors,
#endif
#if SHRINKS
                                    const int* next_order, const int* next_starts, const T* next_factors,
#endif
                                    T* sums, T* normed,
#if SHRINKS
                                    T* shrunk,
#endif
                                    float eps, int rows
#if HAS_LORA
                                    , int num_parts, int versions, int numbers_of_version
#endif
) {
  using P = Pack<T>;
  struct alignas(16) Given {
    Y values[P::size];
  };
#if HAS_LORA
  constexpr int AT_ONCE = K % 16 == 0 ? 16 : 8;  // rows of B
  const int64_t row = SORTED ? order[2 * blockIdx.x] : blockIdx.x, version = order[2 * blockIdx.x + 1];
  const T* b = factors + version * numbers_of_version + starts[1];
  __shared__ float totals[K];
  if (version >= 0)
    for (int k = threadIdx.x; k < K; k += THREADS) {
      float total = 0.0f;
#pragma unroll 4
      for (int p = 0; p < num_parts; p++) total += hidden[((int64_t(p) * rows + row) * versions + version) * K + k];
      totals[k] = total;
    }
  __syncthreads();
#else
  const int64_t row = blockIdx.x;
#endif
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
      float total[P::size] = {};
#if HAS_LORA
#pragma unroll 1
      for (int r = 0; version >= 0 && r < K; r += AT_ONCE) {
        P of_rank[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) of_rank[u] = *reinterpret_cast<const P*>(b + int64_t(r + u) * SIZE + start);
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
#pragma unroll
          for (int j = 0; j < P::size; j++) total[j] += totals[r + u] * float(of_rank[u].values[j]);
      }
#endif
#pragma unroll
      for (int j = 0; j < P::size; j++) {
#pragma unroll
        for (int s = 0; s < SPLITS; s++) total[j] += float(given[s].values[j]);
        stream[c].values[j] = T(total[j] + float(before.values[j]));
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
#if SHRINKS
  __shared__ P line[SIZE / P::size];
#endif
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
#if SHRINKS
    line[start / P::size] = values;
#endif
  }
#if SHRINKS
  __syncthreads();
  constexpr int LINES = 4;  // of A, which a warp reads together
  const bool has_version = next_order[2 * row + 1] >= 0;
  const int lane = threadIdx.x % 32;
  const T* a = next_factors + next_starts[0];
#pragma unroll 1
  for (int first = threadIdx.x / 32 * LINES; first < SHRUNK; first += THREADS / 32 * LINES) {
    float products[LINES] = {};
    if (has_version)
#pragma unroll 4
      for (int start = lane * P::size; start < SIZE; start += 32 * P::size) {
        const P own = line[start / P::size];
        P of_line[LINES];
#pragma unroll
        for (int u = 0; u < LINES; u++) of_line[u] = *reinterpret_cast<const P*>(a + int64_t(first + u) * SIZE + start);
#pragma unroll
        for (int u = 0; u < LINES; u++)
#pragma unroll
          for (int j = 0; j < P::size; j++) products[u] += float(own.values[j]) * float(of_line[u].values[j]);
      }
#pragma unroll
    for (int u = 0; u < LINES; u++) {
#pragma unroll
      for (int other = 16; other > 0; other /= 2) products[u] += __shfl_xor_sync(0xffffffffu, products[u], other);
      if (lane == u) shrunk[row * SHRUNK + first + u] = T(products[u]);
    }
  }
#endif
}
