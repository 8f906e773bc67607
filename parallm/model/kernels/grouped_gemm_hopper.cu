// Products of rows with the weights of the experts that they are sent to, as grouped_gemm.cu, by warpgroups of sm_90a.
// T type of all arrays. A block computes a tile of up to ROWS rows by 64 ACROSS outputs, 2 or 4 times 64, with two
// warpgroups of 64 rows each; STAGES chunks of DEPTH values are in shared memory, and LAG of them are still multiplied
// while the next one begins. BLOCKS fit on an SM.
#include "mma.cuh"
#include "matrices.cuh"
#include "wgmma.cuh"
constexpr int ROWS = 128, DEPTH = 64, COLUMNS = 64 * ACROSS, THREADS = 256;
constexpr int ROW_BYTES = 128, STAGE = (ROWS + COLUMNS) * ROW_BYTES, PITCH = COLUMNS + 8;
constexpr int VECTORS = COLUMNS / 8;  // of a row of outputs
constexpr int AHEAD = STAGES - 1 - LAG;  // chunks that are fetched before they are multiplied

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    grouped_gemm_hopper(const T* x, const T* weights, const int4* tiles, T* y, int depth, int outputs) {
  extern __shared__ __align__(1024) char shared[];
  const int blocks = (outputs + COLUMNS - 1) / COLUMNS;  // beside each other they read the same rows
  const int4 tile = tiles[blockIdx.x / blocks];
  const int column = blockIdx.x % blocks * COLUMNS, rows = tile.z, left = outputs - column;
  if (rows == 0) return;
  const int64_t first = tile.y, expert = tile.x;
  const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
  const int chunks = (depth + DEPTH - 1) / DEPTH;
  const unsigned start = address_of(shared);

  constexpr int AT_ONCE = THREADS / 8;  // rows of which a vector each is fetched
  const int line = threadIdx.x / 8, vector = threadIdx.x % 8;
  const unsigned to_left = start + line * ROW_BYTES + (vector ^ line % 8) * 16;
  const T* from_left = x + (first + line) * depth + vector * 8;
  int at = vector * 8;  // of the next chunk's values, this thread's first
#if TRANSPOSED
  constexpr int AT_ONCE_RIGHT = THREADS / VECTORS;
  const int line_right = threadIdx.x / VECTORS, vector_right = threadIdx.x % VECTORS;
  const unsigned to_right = start + (ROWS + vector_right / 8 * DEPTH + line_right) * ROW_BYTES;
  const T* from_right = weights + (expert * depth + line_right) * outputs + column + vector_right * 8;
  int at_right = line_right;
#else
  const T* from_right = weights + (expert * outputs + column + line) * depth + vector * 8;
#endif
  auto fetch = [&](int chunk, int stage) {
    if (chunk < chunks) {
      const unsigned place = stage * STAGE;
#pragma unroll
      for (int i = 0; i < ROWS; i += AT_ONCE)
        copy_vector(to_left + place + i * ROW_BYTES, from_left + i * depth, line + i < rows && at < depth);
#if TRANSPOSED
#pragma unroll
      for (int i = 0; i < DEPTH; i += AT_ONCE_RIGHT)
        copy_vector(to_right + place + i * ROW_BYTES + (vector_right % 8 ^ (line_right + i) % 8) * 16,
                    from_right + int64_t(i) * outputs, at_right + i < depth && vector_right * 8 < left);
      at_right += DEPTH;
      from_right += int64_t(DEPTH) * outputs;
#else
#pragma unroll
      for (int i = 0; i < COLUMNS; i += AT_ONCE)
        copy_vector(to_left + place + (ROWS + i) * ROW_BYTES, from_right + i * depth, line + i < left && at < depth);
      from_right += DEPTH;
#endif
      at += DEPTH;
      from_left += DEPTH;
    }
    commit_copies();
  };

#pragma unroll
  for (int chunk = 0; chunk < AHEAD; chunk++) fetch(chunk, chunk);
  float sums[COLUMNS / 2] = {};
  const bool active = group * 64 < rows;
  int stage = 0, to_stage = AHEAD;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; chunk++) {
    wait_copies<AHEAD - 1>();
    show_copies();
    __syncthreads();
    if (active) {
      const unsigned left_start = start + stage * STAGE + group * 64 * ROW_BYTES;
      const unsigned right_start = start + stage * STAGE + ROWS * ROW_BYTES;
      begin_products();
#pragma unroll
      for (int k = 0; k < DEPTH / 16; k++)
#if TRANSPOSED
        Product<T, true>::add(sums, describe(left_start + k * 32, 16, 1024),
                              describe(right_start + k * 16 * ROW_BYTES, DEPTH * ROW_BYTES, 1024));
#else
        Product<T, false>::add(sums, describe(left_start + k * 32, 16, 1024), describe(right_start + k * 32, 16, 1024));
#endif
      commit_products();
    }
    fetch(chunk + AHEAD, to_stage);
    wait_products<LAG>();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    to_stage = to_stage + 1 == STAGES ? 0 : to_stage + 1;
  }

  wait_products<0>();
  wait_copies<0>();
  __syncthreads();
  T* const results = reinterpret_cast<T*>(shared);
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int n = 0; n < VECTORS; n++)
      *reinterpret_cast<unsigned*>(results + (threadIdx.x / 32 * 16 + r * 8 + lane / 4) * PITCH + n * 8 + lane % 4 * 2) =
          packed(T(), sums[n * 4 + 2 * r], sums[n * 4 + 2 * r + 1]);
  __syncthreads();
  y += first * outputs + column;
  for (int i = threadIdx.x; i < rows * VECTORS; i += THREADS) {
    const int row = i / VECTORS, at_column = i % VECTORS * 8;
    if (at_column < left)
      *reinterpret_cast<uint4*>(y + int64_t(row) * outputs + at_column) =
          *reinterpret_cast<const uint4*>(results + row * PITCH + at_column);
  }
}
