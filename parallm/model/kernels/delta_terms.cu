// The terms of a scan of the gated delta rule, of a chunk and a value head in each block; see delta_chunks.py.
// With D the gates between two tokens, G those from the chunk's start, b the strengths, B the part below the diagonal:
//   P = D (q k^T)    A = (I + B(b D (k k^T)))^-1    V = A (b v)    W = A (b G k)
// Inputs `q`, `k` (tokens, heads / PER_KEY, DK), `v` (tokens, heads, DV), `log_a` and `b` (tokens, heads), and `tokens`
// (chunks, C), -1 for none. Outputs `values` V (chunks, heads, C, DV), `removals` W (chunks, heads, C, DK), `inner` P
// (chunks, heads, C, C), `gates` (chunks, heads, 2, C): those up to each token, and those after it.
// If BACK also `of_keys` D (k k^T), `inverse` A and `within` P^T s, with `slopes` s (tokens, heads, DV) of the outputs.
#include "tf32.cuh"
#include "matrices.cuh"
#include "delta_chunks.cuh"

// One product of blocks of SIZE: a corner below the diagonal becomes -right corner left, by two of these.
template <int SIZE, class Value>
__device__ __forceinline__ void put_corners(float* to, Value value) {
  constexpr int NUMBERS = C * SIZE / 2, OF_THREAD = (NUMBERS + THREADS - 1) / THREADS;
  float sums[OF_THREAD];
#pragma unroll
  for (int j = 0; j < OF_THREAD; j++) {
    const int i = threadIdx.x + j * THREADS, corner = i / (SIZE * SIZE) * 2 * SIZE;
    const int row = i / SIZE % SIZE, column = i % SIZE;
    sums[j] = 0.0f;
    if (i < NUMBERS)
#pragma unroll 8
      for (int k = 0; k < SIZE; k++) sums[j] += value(corner, row, k, column);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < OF_THREAD; j++) {
    const int i = threadIdx.x + j * THREADS, corner = i / (SIZE * SIZE) * 2 * SIZE;
    if (i < NUMBERS) to[(corner + SIZE + i / SIZE % SIZE) * SQUARE + corner + i % SIZE] = sums[j];
  }
  __syncthreads();
}

template <int SIZE>
__device__ __forceinline__ void merge_blocks(float* lower, float* inverse) {
  put_corners<SIZE>(lower, [&](int corner, int row, int k, int column) {
    return lower[(corner + SIZE + row) * SQUARE + corner + k] * inverse[(corner + k) * SQUARE + corner + column];
  });
  put_corners<SIZE>(inverse, [&](int corner, int row, int k, int column) {
    return -inverse[(corner + SIZE + row) * SQUARE + corner + SIZE + k] *
           lower[(corner + SIZE + k) * SQUARE + corner + column];
  });
}

// (I + L)^-1 of L below the diagonal of `lower`, which is changed: blocks on the diagonal by substitution, then merged.
__device__ __forceinline__ void invert(float* lower, float* inverse) {
  constexpr int BLOCK = 16;
  for (int i = threadIdx.x; i < C * C; i += THREADS)
    if (i / C / BLOCK != i % C / BLOCK) inverse[i / C * SQUARE + i % C] = 0.0f;
  if (threadIdx.x < C) {
    const int first = threadIdx.x / BLOCK * BLOCK, column = threadIdx.x % BLOCK;
    float solved[BLOCK];
#pragma unroll
    for (int row = 0; row < BLOCK; row++) {
      float value = row == column ? 1.0f : 0.0f;
#pragma unroll
      for (int k = 0; k < row; k++) value -= lower[(first + row) * SQUARE + first + k] * solved[k];
      inverse[(first + row) * SQUARE + first + column] = solved[row] = value;
    }
  }
  __syncthreads();
  merge_blocks<16>(lower, inverse);
  merge_blocks<32>(lower, inverse);
}

extern "C" __global__ void __launch_bounds__(THREADS) delta_terms(
    const T* q, const T* k, const T* v, const float* log_a, const T* b, const int* tokens,
#if BACK
    const T* slopes,
#endif
    float* values, float* removals, float* inner, float* gates,
#if BACK
    float* of_keys, float* inverse, float* within,
#endif
    int heads) {
  extern __shared__ __align__(16) float tiles[];
  float* lower = tiles;                // C lines of SQUARE
  float* work = lower + C * SQUARE;    // the same
  T* own_keys = reinterpret_cast<T*>(work + C * SQUARE);
  T* own_queries = own_keys + C * KEYS;
  T* own_values = own_queries + C * KEYS;
  T* own_slopes = own_values + C * VALUES;
  __shared__ float logs[C], strengths[C], from_start[C];
  const int64_t place = blockIdx.x;
  const int head = blockIdx.x % heads, key_heads = heads / PER_KEY;
  tokens += place / heads * C;

  copy_tokens<DK, KEYS>(own_keys, k + head / PER_KEY * DK, tokens, key_heads * DK);
  copy_tokens<DK, KEYS>(own_queries, q + head / PER_KEY * DK, tokens, key_heads * DK);
  commit_copies();
  copy_tokens<DV, VALUES>(own_values, v + head * DV, tokens, heads * DV);
#if BACK
  copy_tokens<DV, VALUES>(own_slopes, slopes + head * DV, tokens, heads * DV);
#endif
  commit_copies();
  if (threadIdx.x < C) {
    const int token = tokens[threadIdx.x];
    const int64_t at = int64_t(max(token, 0)) * heads + head;
    logs[threadIdx.x] = token < 0 ? 0.0f : log_a[at];
    strengths[threadIdx.x] = token < 0 ? 0.0f : float(b[at]);
  }
  __syncthreads();
  put_gates(work, logs);
  if (threadIdx.x < C) {
    float before = 0.0f, after = 0.0f;
    for (int t = 0; t < C; t++) {
      before += t <= threadIdx.x ? logs[t] : 0.0f;
      after += t > threadIdx.x ? logs[t] : 0.0f;
    }
    from_start[threadIdx.x] = gates[place * 2 * C + threadIdx.x] = expf(before);
    gates[place * 2 * C + C + threadIdx.x] = expf(after);
  }
  wait_copies<1>();
  __syncthreads();

  Sums<C, C> of_queries = {}, products = {};
  add_product<DK, EXACT, EXACT>(
      of_queries, [&](int m, int k) { return float(own_queries[m * KEYS + k]); },
      [&](int k, int n) { return float(own_keys[n * KEYS + k]); });
  add_product<DK, EXACT, EXACT>(
      products, [&](int m, int k) { return float(own_keys[m * KEYS + k]); },
      [&](int k, int n) { return float(own_keys[n * KEYS + k]); });
  of_queries.each([&](int m, int n, float& x, float& y) {
    x *= work[m * SQUARE + n], y *= work[m * SQUARE + n + 1];
    put_pair(inner + (place * C + m) * C + n, x, y);
  });
  products.each([&](int m, int n, float& x, float& y) {
    x *= work[m * SQUARE + n], y *= work[m * SQUARE + n + 1];
#if BACK
    put_pair(of_keys + (place * C + m) * C + n, x, y);
#endif
    put_pair(lower + m * SQUARE + n, strengths[m] * x, strengths[m] * y);
  });
  __syncthreads();
  invert(lower, work);
#if BACK
  of_queries.each([&](int m, int n, float& x, float& y) { put_pair(lower + m * SQUARE + n, x, y); });
  for (int i = threadIdx.x; i < C * C; i += THREADS) inverse[place * C * C + i] = work[i / C * SQUARE + i % C];
#endif
  wait_copies<0>();
  __syncthreads();

  Sums<C, DV> of_values = {};
  add_product<C, false, EXACT>(
      of_values, [&](int m, int k) { return work[m * SQUARE + k] * strengths[k]; },
      [&](int k, int n) { return float(own_values[k * VALUES + n]); });
  of_values.each([&](int m, int n, float& x, float& y) { put_pair(values + (place * C + m) * DV + n, x, y); });
  Sums<C, DK> removed = {};
  add_product<C, false, EXACT>(
      removed, [&](int m, int k) { return work[m * SQUARE + k] * (strengths[k] * from_start[k]); },
      [&](int k, int n) { return float(own_keys[k * KEYS + n]); });
  removed.each([&](int m, int n, float& x, float& y) { put_pair(removals + (place * C + m) * DK + n, x, y); });
#if BACK
  Sums<C, DV> seen = {};
  add_product<C, false, EXACT>(
      seen, [&](int m, int k) { return lower[k * SQUARE + m]; },
      [&](int k, int n) { return float(own_slopes[k * VALUES + n]); });
  seen.each([&](int m, int n, float& x, float& y) { put_pair(within + (place * C + m) * DV + n, x, y); });
#endif
}
