// The residual stream after a sublayer, and its RMSNorm; see add_norm.py.
// Inputs `y` (S, B, H) of type Y, parts of the sublayer's output that are still to be added up (any array, if SPLITS is
// 0), the stream `other` (B, H) before it, `weight` (H) of the norm; if HAS_LORA those of expand.cu for one target; if
// SHRINKS `next_order` as there, `next_starts` and `next_factors`, where A (SHRUNK, H) of the only version begins at
// `next_starts[0]`. Outputs `sums` (B, H), rounded as MLX's sum, `normed` (B, H), and if SHRINKS `shrunk` (B, SHRUNK), its
// products with A, zeros for rows without a version.
// T type of all arrays but the parts, SPLITS parts, SIZE of H. A block of BLOCK threads has a row, and each of its first
// threads a vector of it; THREADS, and CHUNKS vectors of each, are those of MLX's kernel, so that sums of squares have its
// order. K columns of A; SORTED as in expand.cu.
// As in expand.cu, time passes in waiting: what does not depend on each other is fetched together.
#include "dependent.cuh"
#include "pack.cuh"
#include "row_scale.cuh"
#include "mma.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) add_norm(const Y* y, const T* other, const T* weight,
#if HAS_LORA
                                                             const float* hidden, const int* order, const int* starts,
                                                             const T* factors,
#endif
#if SHRINKS
                                                             const int* next_order, const int* next_starts,
                                                             const T* next_factors,
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
  const int start = threadIdx.x * P::size;
  const bool is_inside = start < SIZE;
#if HAS_LORA || SHRINKS
  extern __shared__ __align__(128) char shared[];  // B, and the next A
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
#endif
#if HAS_LORA
  const int64_t row = SORTED ? order[2 * blockIdx.x] : blockIdx.x, version = order[2 * blockIdx.x + 1];
  const bool has_lora = version >= 0 && is_inside;
  const T* b = factors + version * numbers_of_version + starts[1] + start;
  if (has_lora)
#pragma unroll 4
    for (int r = 0; r < K; r++) copy_async(to + (r * SIZE + start) * int(sizeof(T)), b + int64_t(r) * SIZE);
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  const int64_t row = blockIdx.x;
#endif
#if SHRINKS
  const bool has_version = next_order[2 * row + 1] >= 0;
  const T* a = next_factors + next_starts[0];
  if (has_version)
#pragma unroll 2
    for (int i = threadIdx.x * P::size; i < SHRUNK * SIZE; i += BLOCK * P::size)
      copy_async(to + (K * SIZE + i) * int(sizeof(T)), a + i);
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  wait_for_inputs();
  Given given[SPLITS ? SPLITS : 1];
  P before, factor;
  if (is_inside) {
#pragma unroll
    for (int s = 0; s < SPLITS; s++)
      given[s] = *reinterpret_cast<const Given*>(y + (int64_t(s) * rows + row) * SIZE + start);
    before = *reinterpret_cast<const P*>(other + row * SIZE + start);
    factor = *reinterpret_cast<const P*>(weight + start);
  }
  float total[P::size] = {};
#if HAS_LORA
  __shared__ float totals[K];
  if (version >= 0)
    for (int k = threadIdx.x; k < K; k += BLOCK) {
      float of_parts = 0.0f;
#pragma unroll 4
      for (int p = 0; p < num_parts; p++) of_parts += hidden[((int64_t(p) * rows + row) * versions + version) * K + k];
      totals[k] = of_parts;
    }
  asm volatile("cp.async.wait_group %0;" ::"n"(SHRINKS) : "memory");
  __syncthreads();
  if (has_lora)
#pragma unroll 4
    for (int r = 0; r < K; r++) {
      const P of_rank = *reinterpret_cast<const P*>(shared + (r * SIZE + start) * int(sizeof(T)));
#pragma unroll
      for (int j = 0; j < P::size; j++) total[j] += totals[r] * float(of_rank.values[j]);
    }
#endif
  P stream;
#pragma unroll
  for (int j = 0; j < P::size; j++) {
    if (is_inside) {
#pragma unroll
      for (int s = 0; s < SPLITS; s++) total[j] += float(given[s].values[j]);
      stream.values[j] = T(total[j] + float(before.values[j]));
    } else {
      stream.values[j] = T(0.0f);
    }
  }
  if (is_inside) *reinterpret_cast<P*>(sums + row * SIZE + start) = stream;
  __shared__ P line[SIZE / P::size];
  float squares = 0.0f;
  auto add_squares = [&](const P& of) {
#pragma unroll
    for (int j = 0; j < P::size; j++) squares += float(of.values[j]) * float(of.values[j]);
  };
  if (CHUNKS == 1) {
    add_squares(stream);
  } else {
    if (is_inside) line[threadIdx.x] = stream;
    __syncthreads();
#pragma unroll 1
    for (int v = threadIdx.x; threadIdx.x < THREADS && v < SIZE / P::size; v += THREADS) add_squares(line[v]);
  }
  const float scale = row_scale(squares, eps);
  if (is_inside) {
    P values;
#pragma unroll
    for (int j = 0; j < P::size; j++)
      values.values[j] = T(float(factor.values[j]) * float(T(float(stream.values[j]) * scale)));
    *reinterpret_cast<P*>(normed + row * SIZE + start) = values;
#if SHRINKS
    line[threadIdx.x] = values;
#endif
  }
#if SHRINKS
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  constexpr int LINES = 4;  // of A, that a warp multiplies together
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = threadIdx.x / 32 * LINES; first < SHRUNK; first += BLOCK / 32 * LINES) {
    float products[LINES] = {};
    if (has_version)
#pragma unroll 1
      for (int v = lane; v < SIZE / P::size; v += 32) {
        const P own = line[v];
        P of_line[LINES];
#pragma unroll
        for (int u = 0; u < LINES; u++)
          of_line[u] = reinterpret_cast<const P*>(shared)[(K + first + u) * (SIZE / P::size) + v];
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
