// Gradients of the inputs of the gated delta rule, of a chunk and a value head in each block; see delta_chunks.py.
// With the terms of delta_terms.cu, the states S and changes U of delta_scan.cu, and the gradients of these, S' and U'
// (those after the chunk), and s of the outputs; M = D (k k^T), D, G, E and g gates as there:
//   W' = -U' S     v* = A^T U'     w* = A^T W'     L' = -(v* V^T + w* W^T) below the diagonal     P' = s U^T
//   X = b D L'     Y = D P'        q' = G (s S) + Y k       v' = b v*
//   k' = E (U S') + (X + X^T) k + Y^T q + b G w*           b' = rows of v* v + G w* k + L' M
// and of log a of a token the sum of what multiplies gates that have it: b L' M + P' P of D, rows of q (s S) + b w* k
// times G, rows of k (U S') times E, and S S' times g.
// Inputs as there; outputs `of_q`, `of_k` (tokens, heads, DK), of type R, `of_v` (tokens, heads, DV), `of_log_a` and
// `of_b` (tokens, heads). `tokens` has more than `chunks` chunks: tokens of no chunk, whose gradients are zeros.
// A block takes STEP of the states' DV lines at a time.
#include "tf32.cuh"
#include "matrices.cuh"
#include "delta_chunks.cuh"

struct alignas(2 * sizeof(R)) PairOfKeys {
  R x, y;
};

extern "C" __global__ void __launch_bounds__(THREADS) delta_gradient(
    const T* q, const T* k, const T* v, const float* log_a, const T* b, const int* tokens, const T* slopes,
    const float* values, const float* removals, const float* inner, const float* gates, const float* of_keys,
    const float* inverse, const float* states, const float* deltas, const float* of_states, const float* of_deltas,
    R* of_q, R* of_k, T* of_v, float* of_log_a, T* of_b, int chunks, int heads) {
  constexpr int LINE = DK + 8, NARROW = DK + 4, WIDE = DV > C ? DV : C, OF_VALUES = WIDE + 4, OF_DELTAS = WIDE + 8;
  constexpr int OF_INVERSE = C + 8;
  extern __shared__ __align__(16) float tiles[];
  float* state = tiles;                        // STEP lines of S, then C of W' and of w*
  float* after = state + C * LINE;             // STEP lines of S', then C of W
  float* delta = after + C * LINE;             // C lines of U, then of V and of X
  float* of_delta = delta + C * OF_VALUES;     // C lines of U', then of v* and of Y
  float* inverted = of_delta + C * OF_DELTAS;  // C lines of A, then of what multiplies gates
  float* between = inverted + C * OF_INVERSE;  // C lines of D, in the place of the slopes
  T* own_slopes = reinterpret_cast<T*>(between);
  T* own_keys = reinterpret_cast<T*>(between + max(C * SQUARE, int(C * VALUES * sizeof(T) / 4)));
  T* own_queries = own_keys + C * KEYS;
  __shared__ float logs[C], strengths[C], from_start[C], to_end[C], starts[C], ends[C], of_all[THREADS / 32];
  __shared__ float parts[5][ACROSS * C], columns[ALONG * C];
  const int64_t place = blockIdx.x;
  const int head = blockIdx.x % heads, key_heads = heads / PER_KEY;
  tokens += place / heads * C;
  if (place >= int64_t(chunks) * heads) {
    for (int i = threadIdx.x; i < C * DK; i += THREADS)
      if (tokens[i / DK] >= 0) {
        const int64_t at = (int64_t(tokens[i / DK]) * heads + head) * DK + i % DK;
        of_q[at] = of_k[at] = R(0.0f);
      }
    for (int i = threadIdx.x; i < C * DV; i += THREADS)
      if (tokens[i / DV] >= 0) of_v[(int64_t(tokens[i / DV]) * heads + head) * DV + i % DV] = T(0.0f);
    if (threadIdx.x < C && tokens[threadIdx.x] >= 0) {
      of_log_a[int64_t(tokens[threadIdx.x]) * heads + head] = 0.0f;
      of_b[int64_t(tokens[threadIdx.x]) * heads + head] = T(0.0f);
    }
    return;
  }

  const auto copy_states = [&](int step) {
    copy_lines<STEP, DK, LINE>(state, states + (place * DV + step) * DK, DK);
    copy_lines<STEP, DK, LINE>(after, of_states + (place * DV + step) * DK, DK);
  };
  copy_lines<C, DV, OF_VALUES>(delta, deltas + place * C * DV, DV);
  copy_lines<C, DV, OF_DELTAS>(of_delta, of_deltas + place * C * DV, DV);
  copy_tokens<DV, VALUES>(own_slopes, slopes + head * DV, tokens, heads * DV);
  copy_states(0);
  commit_copies();
  copy_tokens<DK, KEYS>(own_keys, k + head / PER_KEY * DK, tokens, key_heads * DK);
  copy_tokens<DK, KEYS>(own_queries, q + head / PER_KEY * DK, tokens, key_heads * DK);
  copy_lines<C, C, OF_INVERSE>(inverted, inverse + place * C * C, C);
  commit_copies();
  if (threadIdx.x < C) {
    const int token = tokens[threadIdx.x];
    const int64_t at = int64_t(max(token, 0)) * heads + head;
    logs[threadIdx.x] = token < 0 ? 0.0f : log_a[at];
    strengths[threadIdx.x] = token < 0 ? 0.0f : float(b[at]);
    from_start[threadIdx.x] = gates[place * 2 * C + threadIdx.x];
    to_end[threadIdx.x] = gates[place * 2 * C + C + threadIdx.x];
  }

  Sums<C, DK> of_removals = {}, q_sums = {}, k_sums = {};
  float kept = 0.0f;  // of S S', this thread's part
  for (int step = 0; step < DV; step += STEP) {
    if (step > 0) {
      __syncthreads();
      copy_states(step);
      commit_copies();
      wait_copies<0>();
    } else {
      wait_copies<1>();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < STEP * DK; i += THREADS)
      kept += state[i / DK * LINE + i % DK] * after[i / DK * LINE + i % DK];
    add_product<STEP, false, false>(
        of_removals, [&](int m, int k) { return of_delta[m * OF_DELTAS + step + k]; },
        [&](int k, int n) { return state[k * LINE + n]; });
    add_product<STEP, EXACT, false>(
        q_sums, [&](int m, int k) { return float(own_slopes[m * VALUES + step + k]); },
        [&](int k, int n) { return state[k * LINE + n]; });
    add_product<STEP, false, false>(
        k_sums, [&](int m, int k) { return delta[m * OF_VALUES + step + k]; },
        [&](int k, int n) { return after[k * LINE + n]; });
  }
  Sums<C, C> of_inner = {};
  add_product<DV, EXACT, false>(
      of_inner, [&](int m, int k) { return float(own_slopes[m * VALUES + k]); },
      [&](int k, int n) { return delta[n * OF_VALUES + k]; });
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) kept += __shfl_xor_sync(~0u, kept, lane);
  if (threadIdx.x % 32 == 0) of_all[threadIdx.x / 32] = kept;
  wait_copies<0>();
  __syncthreads();

  copy_lines<C, DV, OF_VALUES>(delta, values + place * C * DV, DV);
  copy_lines<C, DK, NARROW>(after, removals + place * C * DK, DK);
  commit_copies();
  of_removals.each([&](int m, int n, float& x, float& y) { put_pair(state + m * LINE + n, -x, -y); });
  put_gates(between, logs);
  q_sums.each([&](int m, int, float& x, float& y) { x *= from_start[m], y *= from_start[m]; });
  k_sums.each([&](int m, int, float& x, float& y) { x *= to_end[m], y *= to_end[m]; });
  sum_rows(parts[0], q_sums, [&](int m, int n) { return Two(own_queries + m * KEYS + n); });
  sum_rows(parts[1], k_sums, [&](int m, int n) { return Two(own_keys + m * KEYS + n); });
  Sums<C, DV> v_sums = {};
  add_product<C, false, false>(
      v_sums, [&](int m, int k) { return inverted[k * OF_INVERSE + m]; },
      [&](int k, int n) { return of_delta[k * OF_DELTAS + n]; });
  sum_rows(parts[2], v_sums, [&](int m, int n) {
    return Two(v + (int64_t(max(tokens[m], 0)) * heads + head) * DV + n);
  });
  __syncthreads();
  Sums<C, DK> w_sums = {};
  add_product<C, false, false>(
      w_sums, [&](int m, int k) { return inverted[k * OF_INVERSE + m]; },
      [&](int k, int n) { return state[k * LINE + n]; });
  sum_rows(parts[3], w_sums, [&](int m, int n) { return Two(own_keys + m * KEYS + n); });
  k_sums.each_with(w_sums, [&](int m, int, float& x, float& y, float w0, float w1) {
    const float factor = strengths[m] * from_start[m];
    x += factor * w0, y += factor * w1;
  });
  v_sums.each([&](int m, int n, float& x, float& y) {
    put_pair(of_delta + m * OF_DELTAS + n, x, y);
    if (tokens[m] >= 0)
      *reinterpret_cast<Pair*>(of_v + (int64_t(tokens[m]) * heads + head) * DV + n) = {T(strengths[m] * x),
                                                                                     T(strengths[m] * y)};
  });
  __syncthreads();
  w_sums.each([&](int m, int n, float& x, float& y) { put_pair(state + m * NARROW + n, x, y); });
  wait_copies<0>();
  __syncthreads();

  Sums<C, C> of_lower = {};
  add_product<DV, false, false>(
      of_lower, [&](int m, int k) { return of_delta[m * OF_DELTAS + k]; },
      [&](int k, int n) { return delta[n * OF_VALUES + k]; });
  add_product<DK, false, false>(
      of_lower, [&](int m, int k) { return state[m * NARROW + k]; },
      [&](int k, int n) { return after[n * NARROW + k]; });
  of_lower.each([&](int m, int n, float& x, float& y) { x = m > n ? -x : 0.0f, y = m > n + 1 ? -y : 0.0f; });
  sum_rows(parts[4], of_lower, [&](int m, int n) { return Two(of_keys + (place * C + m) * C + n); });
  __syncthreads();
  of_lower.each_with(of_inner, [&](int m, int n, float& x, float& y, float of_inner0, float of_inner1) {
    const int64_t at = (place * C + m) * C + n;
    const float d0 = between[m * SQUARE + n], d1 = between[m * SQUARE + n + 1];
    const Two key_products(of_keys + at), query_products(inner + at);
    x *= strengths[m], y *= strengths[m];
    put_pair(inverted + m * OF_INVERSE + n, x * key_products.x + of_inner0 * query_products.x,
             y * key_products.y + of_inner1 * query_products.y);
    put_pair(delta + m * SQUARE + n, x * d0, y * d1);
    put_pair(of_delta + m * SQUARE + n, of_inner0 * d0, of_inner1 * d1);
  });
  if (threadIdx.x < C) {
    float sums[5] = {}, all = 0.0f;
#pragma unroll
    for (int i = 0; i < 5; i++)
      for (int part = 0; part < ACROSS; part++) sums[i] += parts[i][part * C + threadIdx.x];
    for (int warp = 0; warp < THREADS / 32; warp++) all += of_all[warp];
    const float gate = from_start[threadIdx.x], of_removed = gate * sums[3];
    starts[threadIdx.x] = sums[0] + strengths[threadIdx.x] * of_removed + (threadIdx.x == C - 1 ? gate * all : 0.0f);
    ends[threadIdx.x] = sums[1];
    if (tokens[threadIdx.x] >= 0)
      of_b[int64_t(tokens[threadIdx.x]) * heads + head] = T(sums[2] + of_removed + sums[4]);
  }
  __syncthreads();

  add_product<C, false, EXACT>(
      q_sums, [&](int m, int k) { return of_delta[m * SQUARE + k]; },
      [&](int k, int n) { return float(own_keys[k * KEYS + n]); });
  add_product<C, false, EXACT>(
      k_sums, [&](int m, int k) { return of_delta[k * SQUARE + m]; },
      [&](int k, int n) { return float(own_queries[k * KEYS + n]); });
  add_product<C, false, EXACT>(
      k_sums, [&](int m, int k) { return delta[m * SQUARE + k] + delta[k * SQUARE + m]; },
      [&](int k, int n) { return float(own_keys[k * KEYS + n]); });
  q_sums.each([&](int m, int n, float& x, float& y) {
    if (tokens[m] >= 0)
      *reinterpret_cast<PairOfKeys*>(of_q + (int64_t(tokens[m]) * heads + head) * DK + n) = {R(x), R(y)};
  });
  k_sums.each([&](int m, int n, float& x, float& y) {
    if (tokens[m] >= 0)
      *reinterpret_cast<PairOfKeys*>(of_k + (int64_t(tokens[m]) * heads + head) * DK + n) = {R(x), R(y)};
  });

  Sums<C, C> of_logs = {};  // at (t, j): of log a of token j by gates up to token t
  add_product<C, false, true>(
      of_logs, [&](int m, int k) { return inverted[m * OF_INVERSE + k]; },
      [&](int k, int n) { return k < n ? 1.0f : 0.0f; });
  of_logs.each([&](int m, int n, float& x, float& y) {
    x = m >= n ? x + starts[m] : ends[m], y = m >= n + 1 ? y + starts[m] : ends[m];
  });
  sum_columns(columns, of_logs);
  __syncthreads();
  if (threadIdx.x < C && tokens[threadIdx.x] >= 0) {
    float sum = 0.0f;
    for (int part = 0; part < ALONG; part++) sum += columns[part * C + threadIdx.x];
    of_log_a[int64_t(tokens[threadIdx.x]) * heads + head] = sum;
  }
}
