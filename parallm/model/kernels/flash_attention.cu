#include "mma.cuh"
#include "matrices.cuh"
#include "flash_attention.cuh"
// o = softmax(scale q k^T) v and the logarithm of the softmax's sum, for each packed row of a tile of queries. If PAGED,
// keys and values (pages, heads, COLUMNS, HEAD) are those of the pages whose numbers stand in `pages`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    flash_attention(const T* q, const T* k, const T* v, const float* sinks, const int4* tiles,
#if PAGED
                    const int* pages,
#endif
                    T* o, float* lse, int heads, int window, float scale) {
  extern __shared__ __align__(16) unsigned char shared[];
  T* queries = reinterpret_cast<T*>(shared);
  T* keys = queries + ROWS * PITCH;
  T* values = keys + STAGES * COLUMNS * PITCH;
  const Queries tile(tiles, heads, window);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * WARP_ROWS, begin = tile.begin + warp_row;
  const bool active = begin < tile.rows;
  const int low = tile.position(begin), high = tile.position(min(begin + WARP_ROWS, tile.rows) - 1);
  const float log2_scale = scale * LOG2E;
#if PAGED
  auto copy_keys = [&](int t, T* to_keys, T* to_values) {
    tile.copy_page(t, pages[tile.prefix_start + t], to_keys, to_values, k, v);
  };
#else
  auto copy_keys = [&](int t, T* to_keys, T* to_values) { tile.copy_keys(t, to_keys, to_values, k, v); };
#endif
  Tile<HEAD> sums = {};
  float largest[FRAGMENTS][2], total[FRAGMENTS][2] = {};
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++) largest[f][0] = largest[f][1] = -INFINITY;

  if (tile.count > 0)
    copy_rows(queries, nullptr, ROWS, q, q, [&](int row) { return tile.offset(tile.begin + row); });
#pragma unroll
  for (int t = 0; t < STAGES - 1; t++) {
    if (tile.first + t < tile.count)
      copy_keys(tile.first + t, keys + t * COLUMNS * PITCH, values + t * COLUMNS * PITCH);
    commit_copies();
  }
  for (int t = tile.first, stage = 0; t < tile.count; t++) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    const int next = t + STAGES - 1, to = (stage + STAGES - 1) % STAGES * COLUMNS * PITCH;
    if (next < tile.count) copy_keys(next, keys + to, values + to);
    commit_copies();
    const View view = {t * COLUMNS, low, high, tile.end, window};
    if (active && view.any()) {
      Tile<COLUMNS> score = {};
      multiply_rows<COLUMNS>(score, address_of(queries + warp_row * PITCH), address_of(keys + stage * COLUMNS * PITCH),
                             lane);
      if (!view.all())
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const int token = tile.position(begin + f * 16 + r * 8 + lane / 4);
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
              for (int e = 0; e < 2; e++)
                if (!view.sees(token, n * 8 + lane % 4 * 2 + e)) score[f][n][2 * r + e] = -INFINITY;
          }
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float most = largest[f][r];
#pragma unroll
          for (int n = 0; n < COLUMNS / 8; n++) most = fmaxf(most, fmaxf(score[f][n][2 * r], score[f][n][2 * r + 1]));
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
          most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
          const float base = most == -INFINITY ? 0.0f : most * log2_scale;  // a row that has seen nothing yet
          const float shrink = exp2_of(largest[f][r] * log2_scale - base);
          largest[f][r] = most;
          total[f][r] *= shrink;
#pragma unroll
          for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              score[f][n][2 * r + e] = exp2_of(score[f][n][2 * r + e] * log2_scale - base);
              total[f][r] += score[f][n][2 * r + e];
            }
#pragma unroll
          for (int n = 0; n < HEAD / 8; n++) {
            sums[f][n][2 * r] *= shrink;
            sums[f][n][2 * r + 1] *= shrink;
          }
        }
      multiply_columns<COLUMNS>(sums, score, address_of(values + stage * COLUMNS * PITCH), lane);
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int m = begin + f * 16 + r * 8 + lane / 4;
      float all = total[f][r];
      all += __shfl_xor_sync(~0u, all, 1);
      all += __shfl_xor_sync(~0u, all, 2);
      const bool valid = m < tile.rows && tile.count > 0;
      const float sink = valid ? sinks[tile.head * REPEATS + m % REPEATS] * LOG2E : -INFINITY;
      const float base = fmaxf(largest[f][r] * log2_scale, sink);
      const float shrink = exp2_of(largest[f][r] * log2_scale - base);
      all = all * shrink + exp2_of(sink - base);
      const float inverse = valid ? shrink / all : 0.0f;  // padding has seen nothing: zeros
      if (m < tile.rows && lane % 4 == 0) lse[tile.row(m)] = valid ? base / LOG2E + logf(all) : 0.0f;
#pragma unroll
      for (int n = 0; n < HEAD / 8; n++) {
        sums[f][n][2 * r] *= inverse;
        sums[f][n][2 * r + 1] *= inverse;
      }
    }
  write_rows(queries + warp_row * PITCH, sums, lane, o, [&](int row) { return tile.offset(begin + row); });
}
