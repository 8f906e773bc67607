#include "mma.cuh"
#include "pack.cuh"
#include "matrices.cuh"
#include "flash_attention.cuh"
// Gradient of the queries, and delta = sum(o do) of each packed row.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    flash_attention_queries(const T* q, const T* k, const T* v, const T* o, const T* gradient, const float* lse,
                            const int4* tiles, T* q_gradient, float* delta, int heads, int window, float scale) {
  extern __shared__ __align__(16) unsigned char shared[];
  T* queries = reinterpret_cast<T*>(shared);
  T* gradients = queries + ROWS * PITCH;
  T* keys = gradients + ROWS * PITCH;
  T* values = keys + STAGES * COLUMNS * PITCH;
  const Queries tile(tiles, heads, window);
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * WARP_ROWS, begin = tile.begin + warp_row;
  const bool active = begin < tile.rows;
  const int low = tile.position(begin), high = tile.position(min(begin + WARP_ROWS, tile.rows) - 1);
  Tile<HEAD> sums = {};

  if (tile.count > 0)
    copy_rows(queries, gradients, ROWS, q, gradient, [&](int row) { return tile.offset(tile.begin + row); });
#pragma unroll
  for (int t = 0; t < STAGES - 1; t++) {
    if (tile.first + t < tile.count)
      tile.copy_keys(tile.first + t, keys + t * COLUMNS * PITCH, values + t * COLUMNS * PITCH, k, v);
    commit_copies();
  }
  float log2_lse[FRAGMENTS][2], deltas[FRAGMENTS][2];
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int m = begin + f * 16 + r * 8 + lane / 4;
      const bool valid = m < tile.rows && tile.count > 0;
      float sum = 0.0f;
      if (valid)
        for (int i = lane % 4; i < VECTORS; i += 4) {
          const auto left = reinterpret_cast<const Pack<T>*>(o + tile.offset(m))[i];
          const auto right = reinterpret_cast<const Pack<T>*>(gradient + tile.offset(m))[i];
#pragma unroll
          for (int e = 0; e < Pack<T>::size; e++)
            sum += static_cast<float>(left.values[e]) * static_cast<float>(right.values[e]);
        }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      deltas[f][r] = sum;
      log2_lse[f][r] = valid ? lse[tile.row(m)] * LOG2E : INFINITY;
      if (m < tile.rows && lane % 4 == 0) delta[tile.row(m)] = sum;
    }
  for (int t = tile.first, stage = 0; t < tile.count; t++) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    const int next = t + STAGES - 1, to = (stage + STAGES - 1) % STAGES * COLUMNS * PITCH;
    if (next < tile.count) tile.copy_keys(next, keys + to, values + to, k, v);
    commit_copies();
    const View view = {t * COLUMNS, low, high, tile.end, window};
    if (active && view.any()) {
      const unsigned tile_keys = address_of(keys + stage * COLUMNS * PITCH);
      Tile<COLUMNS> score = {}, slope = {};
      multiply_rows<COLUMNS>(score, address_of(queries + warp_row * PITCH), tile_keys, lane);
      multiply_rows<COLUMNS>(slope, address_of(gradients + warp_row * PITCH),
                             address_of(values + stage * COLUMNS * PITCH), lane);
      const bool all = view.all();
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int token = tile.position(begin + f * 16 + r * 8 + lane / 4);
#pragma unroll
          for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const bool seen = all || view.sees(token, n * 8 + lane % 4 * 2 + e);
              const float p = seen ? exp2_of(score[f][n][2 * r + e] * (scale * LOG2E) - log2_lse[f][r]) : 0.0f;
              slope[f][n][2 * r + e] = p * (slope[f][n][2 * r + e] - deltas[f][r]);
            }
        }
      multiply_columns<COLUMNS>(sums, slope, tile_keys, lane);
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) sums[f][n][e] *= scale;
  write_rows(queries + warp_row * PITCH, sums, lane, q_gradient, [&](int row) { return tile.offset(begin + row); });
}
