// The residual stream after a sublayer, and its RMSNorm; see add_norm.py.
// Inputs `y` (S, B, H) of type Y, parts of the sublayer's output that are still to be added up, the stream `other` (B, H)
// before it, `weight` (H) of the norm. Outputs `sums` (B, H), rounded as MLX's sum, and `normed` (B, H).
// T type of all arrays but the parts, SPLITS parts, SIZE of H; THREADS and CHUNKS vectors of a thread are those of MLX's
// kernel, so that sums of squares have its order. If HAS_LORA the rows' LoRA of K ranks is added, too: `hidden`, `order`,
// `starts` and `factors` are those of expand.cu, for one target.
#include "pack.cuh"

extern "C" __global__ void add_norm(const Y* y, const T* other, const T* weight,
#if HAS_LORA
                                    const float* hidden, const int* order, const int* starts, const T* factors,
#endif
                                    T* sums, T* normed, float eps,
#if HAS_LORA
                                    int num_parts, int versions, int numbers_of_version,
#endif
                                    int rows) {
  using P = Pack<T>;
  struct alignas(16) Given {
    Y values[P::size];
  };
  constexpr int warps = THREADS / 32;
  __shared__ float of_warp[warps];
#if HAS_LORA
  const int64_t row = order[blockIdx.x * 2];
  const int version = order[blockIdx.x * 2 + 1];
  constexpr int AT_ONCE = CHUNKS > 4 ? 2 : 8;  // rows of B: they are waited for together
  __shared__ float totals[K];
  for (int k = threadIdx.x; k < K; k += THREADS) {
    float total = 0.0f;
    if (version >= 0)
#pragma unroll 4
      for (int p = 0; p < num_parts; p++) total += hidden[((p * int64_t(rows) + row) * versions + version) * K + k];
    totals[k] = total;
  }
  __syncthreads();
  float added_up[CHUNKS][P::size] = {};
  const T* b = factors + int64_t(version) * numbers_of_version + starts[1];
#pragma unroll 1
  for (int r = 0; r < (version < 0 ? 0 : K); r += AT_ONCE) {
    P of_rank[CHUNKS][AT_ONCE];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++) {
        const int start = (c * THREADS + threadIdx.x) * P::size;
        if (start < SIZE) of_rank[c][u] = *reinterpret_cast<const P*>(b + int64_t(r + u) * SIZE + start);
      }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++)
#pragma unroll
        for (int j = 0; j < P::size; j++) added_up[c][j] += totals[r + u] * float(of_rank[c][u].values[j]);
  }
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
#pragma unroll
      for (int j = 0; j < P::size; j++) {
#if HAS_LORA
        float sum = added_up[c][j];
#else
        float sum = 0.0f;
#endif
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
  auto added = [](float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
  };
  squares = added(squares);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = added(threadIdx.x % 32 < warps ? of_warp[threadIdx.x % 32] : 0.0f);
  const float scale = rsqrtf(squares / SIZE + eps);
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
