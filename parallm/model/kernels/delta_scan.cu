// States of the gated delta rule that pass through the chunks of rows; see delta_chunks.py.
//   U = V - W S^T              S <- g S + (U E)^T k
// with the gates G from a chunk's start, E to its end and g of all its tokens; if BACK, from the last chunk to the
// first. A block takes a row's head and SLICE of the state's DV lines. Inputs `k`, `q` (tokens, heads / PER_KEY, DK),
// `slopes` s (tokens, heads, DV), `tokens` (chunks, C), `gates` (chunks, heads, 2, C), `values` V (chunks, heads, C,
// DV), `removals` W (chunks, heads, C, DK); `rows` (rows, 2), the place in `initial` (any number, heads, DV, DK) of the
// state that a row begins with (-1: zeros), and the place in `last` of the state after it; `starts` (steps + 1), the
// chunk at which each step begins, with a chunk for each of its rows. Outputs, of chunks from `first` on: `states`, S
// before each chunk, `deltas`, U, and S after all.
#include "tf32.cuh"
#include "matrices.cuh"
#include "delta_chunks.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_scan(
    const T* k,
#if BACK
    const T* q, const T* slopes,
#endif
    const int* tokens, const float* gates, const float* values, const float* removals, const float* initial,
    const int* rows, const int* starts, float* states, float* deltas, float* last, int first, int heads, int steps) {
  constexpr int LINE = DK + 4, OF_DELTA = SLICE + 8, OF_SLOPES = SLICE + 16 / sizeof(T);
  extern __shared__ __align__(16) float tiles[];
  float* state = tiles;                   // SLICE lines
  float* removed = state + SLICE * LINE;  // C lines
  float* delta = removed + C * LINE;      // C lines of OF_DELTA
  T* own_keys = reinterpret_cast<T*>(delta + C * OF_DELTA);
  T* own_queries = own_keys + C * KEYS;
  T* own_slopes = own_queries + C * KEYS;  // C lines of OF_SLOPES
  __shared__ float of_chunk[2 * C];
  const float *from_start = of_chunk, *to_end = of_chunk + C;
  const int slice = blockIdx.x % (DV / SLICE) * SLICE, row = blockIdx.x / (DV / SLICE) / heads;
  const int head = blockIdx.x / (DV / SLICE) % heads, key_heads = heads / PER_KEY;
  const int origin = rows[2 * row];
  int count = 0;
  while (count < steps && row < starts[count + 1] - starts[count]) count++;

  Sums<SLICE, DK> sums = {};
  if (origin >= 0)
    sums.each([&](int m, int n, float& x, float& y) {
      const float* from = initial + ((int64_t(origin) * heads + head) * DV + slice + m) * DK + n;
      x = from[0], y = from[1];
    });
  const auto chunk_of = [&](int n) { return int64_t(first) + starts[BACK ? count - 1 - n : n] + row; };
  const auto copy_keys = [&](int n) {
    const int64_t chunk = chunk_of(n);
    copy_tokens<DK, KEYS>(own_keys, k + head / PER_KEY * DK, tokens + chunk * C, key_heads * DK);
  };
  const auto copy_removals = [&](int n) {
    copy_lines<C, DK, LINE>(removed, removals + (chunk_of(n) * heads + head) * C * DK, DK);
  };
  // what the first product of chunk n reads, and what the second one does
  const auto copy_first = [&](int n) {
    if (n < count) BACK ? copy_keys(n) : copy_removals(n);
    commit_copies();
  };
  const auto copy_second = [&](int n) {
    if (n < count) {
#if BACK
      const int64_t chunk = chunk_of(n);
      copy_removals(n);
      copy_tokens<DK, KEYS>(own_queries, q + head / PER_KEY * DK, tokens + chunk * C, key_heads * DK);
      copy_tokens<SLICE, OF_SLOPES>(own_slopes, slopes + head * DV + slice, tokens + chunk * C, heads * DV);
#else
      copy_keys(n);
#endif
    }
    commit_copies();
  };
  copy_first(0);
  copy_second(0);

  for (int n = 0; n < count; n++) {
    const int64_t place = chunk_of(n) * heads + head, output = place - int64_t(first) * heads;
    if (threadIdx.x < 2 * C) of_chunk[threadIdx.x] = gates[place * 2 * C + threadIdx.x];
    Sums<C, SLICE> given, read = {};
    given.each([&](int m, int n, float& x, float& y) {
      const float* from = values + (place * C + m) * DV + slice + n;
      x = from[0], y = from[1];
    });
    sums.each([&](int m, int n, float& x, float& y) {
      put_pair(state + m * LINE + n, x, y);
      put_pair(states + (output * DV + slice + m) * DK + n, x, y);
    });
    wait_copies<1>();
    __syncthreads();
#if BACK
    add_product<DK, EXACT, false>(
        read, [&](int m, int k) { return float(own_keys[m * KEYS + k]); },
        [&](int k, int n) { return state[n * LINE + k]; });
#else
    add_product<DK, false, false>(
        read, [&](int m, int k) { return removed[m * LINE + k]; }, [&](int k, int n) { return state[n * LINE + k]; });
#endif
    const float all = from_start[C - 1];
    read.each_with(given, [&](int m, int n, float& x, float& y, float u0, float u1) {
#if BACK
      u0 += to_end[m] * x, u1 += to_end[m] * y;
      put_pair(delta + m * OF_DELTA + n, -u0, -u1);
#else
      u0 -= x, u1 -= y;
      put_pair(delta + m * OF_DELTA + n, to_end[m] * u0, to_end[m] * u1);
#endif
      put_pair(deltas + (output * C + m) * DV + slice + n, u0, u1);
    });
    wait_copies<0>();
    __syncthreads();
    copy_first(n + 1);
    sums.each([&](int m, int n, float& x, float& y) { x *= all, y *= all; });
#if BACK
    add_product<C, false, false>(
        sums, [&](int m, int k) { return delta[k * OF_DELTA + m]; },
        [&](int k, int n) { return removed[k * LINE + n]; });
    add_product<C, false, EXACT>(
        sums, [&](int m, int k) { return float(own_slopes[k * OF_SLOPES + m]) * from_start[k]; },
        [&](int k, int n) { return float(own_queries[k * KEYS + n]); });
#else
    add_product<C, false, EXACT>(
        sums, [&](int m, int k) { return delta[k * OF_DELTA + m]; },
        [&](int k, int n) { return float(own_keys[k * KEYS + n]); });
#endif
    __syncthreads();
    copy_second(n + 1);
  }
  sums.each([&](int m, int n, float& x, float& y) {
    put_pair(last + ((int64_t(rows[2 * row + 1]) * heads + head) * DV + slice + m) * DK + n, x, y);
  });
}
