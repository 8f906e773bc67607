#include "mma.cuh"
#include "matrices.cuh"
#include "flash_attention.cuh"
// Gradients of keys and values. A block takes up to ROWS neighbouring keys of one head, and goes through the sequences
// of queries that visit them, COLUMNS packed rows at a time. Where others share its visits (PARTIAL) it writes float32
// sums, which a block of a later launch adds in their order.
// tiles: (first token, tokens, first visit, visits), or (first token, tokens, first partial, -partials).
// visits: (first token, tokens, position of the first less that of the tile's first key).

// One step of a block: a tile of the rows of a visit.
struct Cursor {
  const int4* visits;
  int visit, end, keys, window, rows, steps, step;
  int4 sequence;

  __device__ Cursor(const int4* visits, const int4& tile, int window)
      : visits(visits), visit(tile.z), end(tile.z + max(0, tile.w)), keys(tile.y), window(window), step(0) {
    load();
  }
  __device__ bool valid() const { return visit < end; }
  __device__ void load() {
    for (; visit < end; visit++) {
      sequence = visits[visit];
      rows = min(sequence.y, window - sequence.z + keys - 1) * REPEATS;  // later tokens see none of the keys
      steps = (rows + COLUMNS - 1) / COLUMNS;
      if (rows > 0) return;
    }
  }
  __device__ void next() {
    if (valid() && ++step >= steps) {
      visit++;
      step = 0;
      load();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    flash_attention_keys(const T* q, const T* k, const T* v, const T* gradient, const float* lse, const float* delta,
                         const int4* tiles, const int4* visits, const float4* k_partials, const float4* v_partials,
                         OUTPUT* k_gradient, OUTPUT* v_gradient, int heads, int window, float scale) {
  extern __shared__ __align__(16) unsigned char shared[];
  T* keys = reinterpret_cast<T*>(shared);
  T* values = keys + ROWS * PITCH;
  T* queries = values + ROWS * PITCH;
  T* gradients = queries + STAGES * COLUMNS * PITCH;
  float* lses = reinterpret_cast<float*>(gradients + STAGES * COLUMNS * PITCH);
  float* deltas = lses + STAGES * COLUMNS;
  const int head = blockIdx.x % heads, lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * WARP_ROWS;
  const int4 tile = tiles[blockIdx.x / heads];
  auto offset = [&](int key) { return key < tile.y ? ((tile.x + key) * heads + head) * HEAD : -1; };
#if !PARTIAL
  if (tile.w < 0) {
    for (int i = threadIdx.x; i < tile.y * (HEAD / 4); i += THREADS) {
      const int key = i / (HEAD / 4), vector = i % (HEAD / 4);
#pragma unroll
      for (int which = 0; which < 2; which++) {
        float4 sum = {};
        for (int part = tile.z; part < tile.z - tile.w; part++) {
          const int64_t at = (static_cast<int64_t>(part) * heads + head) * ROWS + key;
          const float4 more = (which ? v_partials : k_partials)[at * (HEAD / 4) + vector];
          sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        *reinterpret_cast<uint2*>((which ? v_gradient : k_gradient) + offset(key) + vector * 4) =
            make_uint2(pack_values(sum.x, sum.y), pack_values(sum.z, sum.w));
      }
    }
    return;
  }
#endif
  copy_rows(keys, values, ROWS, k, v, offset);
  Tile<HEAD> k_sums = {}, v_sums = {};

  auto copy_queries = [&](const Cursor& at, int stage) {
    auto row_of = [&](int row) {
      const int m = at.step * COLUMNS + row;
      return m < at.rows ? ((at.sequence.x + m / REPEATS) * heads + head) * REPEATS + m % REPEATS : -1;
    };
    const int place = stage * COLUMNS * PITCH;
    copy_rows(queries + place, gradients + place, COLUMNS, q, gradient, [&](int row) { return row_of(row) * HEAD; });
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
      const int row = row_of(i);
      copy_float(address_of(lses + stage * COLUMNS + i), lse + max(0, row), row >= 0);
      copy_float(address_of(deltas + stage * COLUMNS + i), delta + max(0, row), row >= 0);
    }
  };
  Cursor at(visits, tile, window), ahead = at;
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) {
    if (ahead.valid()) copy_queries(ahead, stage);
    commit_copies();
    ahead.next();
  }
  for (int stage = 0; at.valid(); at.next()) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    if (ahead.valid()) copy_queries(ahead, (stage + STAGES - 1) % STAGES);
    commit_copies();
    ahead.next();
    const int from = at.step * COLUMNS, first_key = warp_row, last_key = min(warp_row + WARP_ROWS, tile.y) - 1;
    const int nearest = at.sequence.z + from / REPEATS;  // distance of the first token from the tile's first key
    const int farthest = at.sequence.z + (min(from + COLUMNS, at.rows) - 1) / REPEATS;
    if (first_key < tile.y && farthest >= first_key && nearest - last_key < window) {
      const bool all = nearest >= last_key && farthest - first_key < window && from + COLUMNS <= at.rows;
      const unsigned tile_queries = address_of(queries + stage * COLUMNS * PITCH);
      const unsigned tile_gradients = address_of(gradients + stage * COLUMNS * PITCH);
      Tile<COLUMNS> p = {}, slope = {};
      multiply_rows<COLUMNS>(p, address_of(keys + warp_row * PITCH), tile_queries, lane);
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int column = n * 8 + lane % 4 * 2 + e, m = from + column;
          const float log2_lse = lses[stage * COLUMNS + column] * LOG2E;
#pragma unroll
          for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
              const int distance = at.sequence.z + m / REPEATS - (warp_row + f * 16 + r * 8 + lane / 4);
              const bool seen = all || (distance >= 0 && distance < window && m < at.rows);
              float& value = p[f][n][2 * r + e];
              value = seen ? exp2_of(value * (scale * LOG2E) - log2_lse) : 0.0f;
            }
        }
      multiply_columns<COLUMNS>(v_sums, p, tile_gradients, lane);
      multiply_rows<COLUMNS>(slope, address_of(values + warp_row * PITCH), tile_gradients, lane);
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float row_delta = deltas[stage * COLUMNS + n * 8 + lane % 4 * 2 + e];
#pragma unroll
          for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
            for (int r = 0; r < 2; r++) slope[f][n][2 * r + e] = p[f][n][2 * r + e] * (slope[f][n][2 * r + e] - row_delta);
        }
      multiply_columns<COLUMNS>(k_sums, slope, tile_queries, lane);
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) k_sums[f][n][e] *= scale;
#if PARTIAL
  const int64_t partial = static_cast<int64_t>(blockIdx.x) * ROWS;  // block x is tile x / heads, head x % heads
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int key = warp_row + f * 16 + r * 8 + lane / 4;
      if (key < tile.y)
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
          const int64_t to = (partial + key) * HEAD + n * 8 + lane % 4 * 2;
          *reinterpret_cast<float2*>(k_gradient + to) = make_float2(k_sums[f][n][2 * r], k_sums[f][n][2 * r + 1]);
          *reinterpret_cast<float2*>(v_gradient + to) = make_float2(v_sums[f][n][2 * r], v_sums[f][n][2 * r + 1]);
        }
    }
#else
  wait_copies<0>();
  __syncthreads();  // a tile without visits has not waited for its keys
  write_rows(keys + warp_row * PITCH, k_sums, lane, k_gradient, [&](int row) { return offset(warp_row + row); });
  write_rows(values + warp_row * PITCH, v_sums, lane, v_gradient, [&](int row) { return offset(warp_row + row); });
#endif
}
