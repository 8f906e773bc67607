// Outputs of the gated delta rule, of SLICE values of a chunk and a head in each block; see delta_chunks.py.
//   O = G (q S^T) + P U
// Inputs as in delta_scan.cu, and its `states` S and `deltas` U; `inner` P (chunks, heads, C, C). Output `outputs`
// (tokens, heads, DV). `tokens` has more than `chunks` chunks: tokens of no chunk, whose outputs are zeros.
#include "tf32.cuh"
#include "matrices.cuh"
#include "delta_chunks.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) delta_outputs(
    const T* q, const int* tokens, const float* gates, const float* inner, const float* states, const float* deltas,
    T* outputs, int chunks, int heads) {
  constexpr int LINE = DK + 4, OF_DELTA = SLICE + 8;
  extern __shared__ __align__(16) float tiles[];
  float* state = tiles;                  // SLICE lines
  float* delta = state + SLICE * LINE;   // C lines of OF_DELTA
  float* weights = delta + C * OF_DELTA;  // C lines of SQUARE
  T* own_queries = reinterpret_cast<T*>(weights + C * SQUARE);
  const int slice = blockIdx.x % (DV / SLICE) * SLICE;
  const int64_t place = blockIdx.x / (DV / SLICE);
  const int head = place % heads, key_heads = heads / PER_KEY;
  tokens += place / heads * C;
  Sums<C, SLICE> sums = {};
  if (place < int64_t(chunks) * heads) {
    copy_tokens<DK, KEYS>(own_queries, q + head / PER_KEY * DK, tokens, key_heads * DK);
    copy_lines<SLICE, DK, LINE>(state, states + (place * DV + slice) * DK, DK);
    commit_copies();
    copy_lines<C, C, SQUARE>(weights, inner + place * C * C, C);
    copy_lines<C, SLICE, OF_DELTA>(delta, deltas + place * C * DV + slice, DV);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    add_product<DK, EXACT, false>(
        sums, [&](int m, int k) { return float(own_queries[m * KEYS + k]); },
        [&](int k, int n) { return state[n * LINE + k]; });
    sums.each([&](int m, int, float& x, float& y) {
      const float gate = gates[place * 2 * C + m];
      x *= gate, y *= gate;
    });
    wait_copies<0>();
    __syncthreads();
    add_product<C, false, false>(
        sums, [&](int m, int k) { return weights[m * SQUARE + k]; },
        [&](int k, int n) { return delta[k * OF_DELTA + n]; });
  }
  sums.each([&](int m, int n, float& x, float& y) {
    if (tokens[m] >= 0)
      *reinterpret_cast<Pair*>(outputs + (int64_t(tokens[m]) * heads + head) * DV + slice + n) = {T(x), T(y)};
  });
}
