// flash_attention.cu for warpgroups of sm_90a, with the same parameters and results. A block has warpgroups of 64 rows
// of queries each, and one more whose warps in turn fetch tiles of COLUMNS keys and values, STAGES of them ahead. A
// warpgroup multiplies queries by the next tile's keys while it multiplies weights by values, and computes the next
// weights meanwhile. OWN registers are for a thread with rows, SPARE ones for others.
#include "mma.cuh"
#include "matrices.cuh"
#include "wgmma.cuh"
#include "flash_attention.cuh"
constexpr int ROW_BYTES = 128, GROUP_THREADS = 128, GROUP_ROWS = 64;  // of matrices in shared memory, of warpgroups
constexpr int GROUPS = WARPS / 4, PAGE = 64, TILE_BYTES = COLUMNS * HEAD * 2, LINES = 32 / VECTORS;
static_assert(STAGES == 4, "a stage is always the same one of four warps', so that its barriers are in order");
// matrices in shared memory are panels of 64 columns; after queries, and keys and values of each stage, come barriers
constexpr int STAGE_BYTES = 2 * TILE_BYTES, QUERY_BYTES = ROWS * HEAD * 2;
constexpr int ALL_BYTES = QUERY_BYTES + STAGES * STAGE_BYTES;

__device__ __forceinline__ int place_of(int rows, int row, int vector) {
  return (vector / 8 * rows + row) * ROW_BYTES + (vector % 8 ^ row % 8) * 16;
}

extern "C" __global__ void __launch_bounds__(THREADS + GROUP_THREADS, 1)
    flash_attention_hopper(const T* q, const T* k, const T* v, const float* sinks, const int4* tiles,
#if PAGED
                           const int* pages,
#endif
                           T* o, float* lse, int heads, int window, float scale) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned start = address_of(shared), full = start + ALL_BYTES, empty = full + STAGES * 8;
  const Queries tile(tiles, heads, window);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = threadIdx.x / GROUP_THREADS;
  const int count = tile.count - tile.first;
  if (threadIdx.x < STAGES) {
    init_barrier(full + threadIdx.x * 8, 1);
    init_barrier(empty + threadIdx.x * 8, WARPS);
  }
  __syncthreads();

  if (group == GROUPS) {
    give_registers<SPARE>();
    const int line = lane / VECTORS, vector = lane % VECTORS, stage = warp - WARPS;
#pragma unroll 1
    for (int i = stage; i < count; i += STAGES) {
      const int t = tile.first + i;
      if (i >= STAGES) wait_barrier(empty + stage * 8, (i / STAGES - 1) & 1);
      const unsigned to = start + QUERY_BYTES + stage * STAGE_BYTES;
#pragma unroll
      for (int page = 0; page < COLUMNS / PAGE; page++) {
        const int at = t * COLUMNS + page * PAGE;
#if PAGED
        const int number = at < tile.end ? pages[tile.prefix_start + at / PAGE] : 0;
        const int64_t first = (int64_t(number) * heads + tile.head) * PAGE * HEAD;
#endif
#pragma unroll 1
        for (int eight = 0; eight < PAGE; eight += 8)
#pragma unroll
          for (int row = line; row < line + 8; row += LINES) {
            const int position = at + eight + row;
#if PAGED
            const int64_t from = first + (eight + row) * HEAD;
#else
            const int shift = position < tile.prefix ? tile.prefix_start : tile.start - tile.prefix;
            const int64_t from = position < tile.end ? (int64_t(shift + position) * heads + tile.head) * HEAD : 0;
#endif
            const unsigned place = to + (page * PAGE + eight) * ROW_BYTES + place_of(COLUMNS, row, vector);
            copy_vector(place, k + from + vector * 8, position < tile.end);
            copy_vector(place + TILE_BYTES, v + from + vector * 8, position < tile.end);
          }
      }
      commit_copies();
      wait_copies<0>();
      show_copies();
      __syncwarp();
      if (lane == 0) arrive(full + stage * 8);
    }
    return;
  }
  take_registers<OWN>();
  const int begin = tile.begin + group * GROUP_ROWS, warp_begin = tile.begin + warp * 16;
  const int low = tile.position(warp_begin), high = tile.position(min(warp_begin + 16, tile.rows) - 1);
  const float log2_scale = scale * LOG2E;
  // tiles that any row of the warpgroup sees
  const int last = (tile.position(min(begin + GROUP_ROWS, tile.rows) - 1) - tile.first * COLUMNS) / COLUMNS;
  const int own = begin < tile.rows ? min(count, last + 1) : 0;
  const unsigned queries = start + group * GROUP_ROWS * ROW_BYTES;
  float sums[HEAD / 2] = {}, score[COLUMNS / 2], largest[2] = {-INFINITY, -INFINITY}, total[2] = {}, shrink[2];
  unsigned weights[COLUMNS / 16][4];

  for (int i = lane; i < 16 * VECTORS; i += 32) {
    const int row = warp * 16 + i / VECTORS, offset = own > 0 ? tile.offset(tile.begin + row) : -1;
    copy_vector(start + place_of(ROWS, row, i % VECTORS), q + max(0, offset) + i % VECTORS * 8, offset >= 0);
  }
  commit_copies();
  wait_copies<0>();
  show_copies();
  sync_group(group);

  auto wait_tile = [&](int i) { wait_barrier(full + i % STAGES * 8, i / STAGES & 1); };
  auto release = [&](int i) {
    if (lane == 0) arrive(empty + i % STAGES * 8);
  };
  auto multiply_keys = [&](int i) {
    const unsigned keys = start + QUERY_BYTES + i % STAGES * STAGE_BYTES;
#pragma unroll
    for (int n = 0; n < HEAD / 16; n++)
      Products<T>::add_rows(score, describe(queries + n / 4 * ROWS * ROW_BYTES + n % 4 * 32, 16, 8 * ROW_BYTES),
                            describe(keys + n / 4 * COLUMNS * ROW_BYTES + n % 4 * 32, 16, 8 * ROW_BYTES), n > 0);
    commit_products();
  };
  auto multiply_values = [&](int i) {
    const unsigned values = start + QUERY_BYTES + i % STAGES * STAGE_BYTES + TILE_BYTES;
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; n++)
      Products<T>::add_columns(sums, weights[n],
                               describe(values + n * 16 * ROW_BYTES, COLUMNS * ROW_BYTES, 8 * ROW_BYTES));
    commit_products();
  };
  // scores become weights that are not rounded yet; sums before must shrink
  auto weigh = [&](int i) {
    const View view = {(tile.first + i) * COLUMNS, low, high, tile.end, window};
    if (!view.all())
#pragma unroll
      for (int r = 0; r < 2; r++) {
        // as `View::sees`, but columns are constants: without, registers spill where REPEATS is 1
        const int token = tile.position(warp_begin + r * 8 + lane / 4), start = view.start + lane % 4 * 2;
        const int latest = min(token, tile.end - 1) - start, before = token - window - start;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (n * 8 + e > latest || n * 8 + e <= before) score[n * 4 + 2 * r + e] = -INFINITY;
      }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float most = largest[r];
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++) most = fmaxf(most, fmaxf(score[n * 4 + 2 * r], score[n * 4 + 2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float base = most == -INFINITY ? 0.0f : most * log2_scale;  // a row that has seen nothing yet
      shrink[r] = exp2_of(largest[r] * log2_scale - base);
      largest[r] = most;
      total[r] *= shrink[r];
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& one = score[n * 4 + 2 * r + e];
          one = exp2_of(one * log2_scale - base);
          total[r] += one;
        }
    }
  };
  auto round_weights = [&] {
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; n++)
#pragma unroll
      for (int part = 0; part < 4; part++)
        weights[n][part] = pack_values(score[n * 8 + part * 2], score[n * 8 + part * 2 + 1]);
  };

  int i = 0;
  if (own > 0) {
    wait_tile(0);
    begin_products();
    multiply_keys(0);
    wait_products<0>();
    hold(score);
    weigh(0);
    round_weights();
#pragma unroll 1
    for (i = 1; i < own; i++) {
      wait_tile(i);
      hold(score);
      hold(sums);
      hold(weights);
      begin_products();
      multiply_keys(i);
      multiply_values(i - 1);
      wait_products<1>();
      hold(score);
      weigh(i);
      wait_products<0>();
      hold(sums);
      hold(weights);
      release(i - 1);
#pragma unroll
      for (int n = 0; n < HEAD / 2; n++) sums[n] *= shrink[n / 2 % 2];
      round_weights();
    }
    hold(sums);
    hold(weights);
    begin_products();
    multiply_values(own - 1);
    wait_products<0>();
    hold(sums);
    release(own - 1);
  }
  for (; i < count; i++) {  // tiles that other rows see
    wait_tile(i);
    release(i);
  }

  sync_group(group);  // results go where the warpgroup's queries were
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int m = warp_begin + r * 8 + lane / 4;
    float all = total[r];
    all += __shfl_xor_sync(~0u, all, 1);
    all += __shfl_xor_sync(~0u, all, 2);
    const bool valid = m < tile.rows && count > 0;
    const float sink = valid ? sinks[tile.head * REPEATS + m % REPEATS] * LOG2E : -INFINITY;
    const float base = fmaxf(largest[r] * log2_scale, sink);
    const float less = exp2_of(largest[r] * log2_scale - base);
    all = all * less + exp2_of(sink - base);
    const float inverse = valid ? less / all : 0.0f;  // padding has seen nothing: zeros
    if (m < tile.rows && lane % 4 == 0) lse[tile.row(m)] = valid ? base / LOG2E + logf(all) : 0.0f;
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++)
      *reinterpret_cast<unsigned*>(shared + place_of(ROWS, warp * 16 + r * 8 + lane / 4, n) + lane % 4 * 4) =
          pack_values(sums[n * 4 + 2 * r] * inverse, sums[n * 4 + 2 * r + 1] * inverse);
  }
  __syncwarp();
  for (int j = lane; j < 16 * VECTORS; j += 32) {
    const int row = warp * 16 + j / VECTORS, offset = tile.offset(tile.begin + row);
    if (offset >= 0)
      *reinterpret_cast<uint4*>(o + offset + j % VECTORS * 8) =
          *reinterpret_cast<const uint4*>(shared + place_of(ROWS, row, j % VECTORS));
  }
}
