// Products of rows with the weights of the experts that they are sent to; rows are in the order of their experts.
// Inputs `x` (N, depth), `weights` (E, outputs, depth), or (E, depth, outputs) if TRANSPOSED, and `tiles` (M, 4) of
// grouped_gemm_tiles.cu; if RANK `hidden` (N, RANK) and `factors` (E, RANK, outputs), whose product is added. Output `y`
// (N, outputs). Depth, outputs and RANK are multiples of 8, RANK at most DEPTH.
// T type of all arrays. A block computes a tile of up to ROWS rows by 64 ACROSS outputs with two by ACROSS warps, STAGES
// chunks of DEPTH values under way; BLOCKS fit on an SM. Tiles of fewer rows take fewer fragments of each warp.
// Vectors of 16 bytes of 8 rows lie in 8 different groups of banks: vector v of row r is at place v ^ r % 8.
#include "mma.cuh"
#include "matrices.cuh"
constexpr int ROWS = 128, DEPTH = 64, COLUMNS = 64 * ACROSS, THREADS = 64 * ACROSS;
constexpr int ROW_BYTES = DEPTH * 2, STAGE = (ROWS + COLUMNS) * ROW_BYTES, PITCH = COLUMNS + 8;
constexpr int VECTORS = COLUMNS / 8;  // of a row of outputs

struct Operands {
  unsigned left[4][4], right[4][4];
};

template <int FRAGMENTS>
__device__ __forceinline__ void multiply_all(float (&sums)[FRAGMENTS][8][4], const Operands& own) {
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int n = 0; n < 8; n++)
      multiply<T>(sums[f][n], own.left[f][0], own.left[f][1], own.left[f][2], own.left[f][3],
                  own.right[n / 2][n % 2 * 2], own.right[n / 2][n % 2 * 2 + 1]);
}

// FRAGMENTS times 32 rows hold all of the tile's `rows`; `left` outputs are left from its first one on.
template <int FRAGMENTS>
__device__ __forceinline__ void multiply_tile(const T* x, const T* weights, const T* hidden, const T* factors, T* y,
                                              char* shared, int rows, int left, int depth, int outputs) {
  const int lane = threadIdx.x % 32, across = threadIdx.x / 32 % ACROSS, along = threadIdx.x / 32 / ACROSS;
  const int chunks = (depth + DEPTH - 1) / DEPTH;
  const unsigned start = address_of(shared);

  constexpr int AT_ONCE = THREADS / 8;  // rows of which a vector each is fetched
  const int line = threadIdx.x / 8, vector = threadIdx.x % 8;
  const unsigned to_left = start + line * ROW_BYTES + (vector ^ line % 8) * 16;
  const T* from_left = x + int64_t(line) * depth + vector * 8;
  int at = vector * 8;  // of the next chunk's values, this thread's first
#if TRANSPOSED
  constexpr int AT_ONCE_RIGHT = THREADS / VECTORS;
  const int line_right = threadIdx.x / VECTORS, vector_right = threadIdx.x % VECTORS;
  const unsigned to_right = start + ROWS * ROW_BYTES + line_right * COLUMNS * 2 + (vector_right ^ line_right % 8) * 16;
  const T* from_right = weights + int64_t(line_right) * outputs + vector_right * 8;
  int at_right = line_right;
#else
  const T* from_right = weights + int64_t(line) * depth + vector * 8;
#endif
  auto fetch = [&](int chunk, int stage) {
    if (chunk < chunks) {
      const unsigned place = stage * STAGE;
#pragma unroll
      for (int i = 0; i < FRAGMENTS * 32; i += AT_ONCE)
        copy_vector(to_left + place + i * ROW_BYTES, from_left + i * depth, line + i < rows && at < depth);
#if TRANSPOSED
#pragma unroll
      for (int i = 0; i < DEPTH; i += AT_ONCE_RIGHT)
        copy_vector(to_right + place + i * COLUMNS * 2, from_right + int64_t(i) * outputs,
                    at_right + i < depth && vector_right * 8 < left);
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

  const unsigned read_left = start + (along * 16 + lane % 16) * ROW_BYTES;
#if TRANSPOSED
  const unsigned read_right = start + ROWS * ROW_BYTES + lane % 16 * COLUMNS * 2 + across * 128;
#else
  const unsigned read_right = start + (ROWS + across * 64 + lane % 8 + lane / 16 * 8) * ROW_BYTES;
#endif
  auto read = [&](Operands& to, int stage, int k) {
    const unsigned place = stage * STAGE;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
      load_matrices(to.left[f], read_left + place + f * 32 * ROW_BYTES + ((k * 2 + lane / 16) ^ lane % 8) * 16);
#pragma unroll
    for (int n = 0; n < 4; n++)
#if TRANSPOSED
      load_transposed(to.right[n],
                      read_right + place + k * 16 * COLUMNS * 2 + ((n * 2 + lane / 16) ^ lane % 8) * 16);
#else
      load_matrices(to.right[n],
                    read_right + place + n * 16 * ROW_BYTES + ((k * 2 + lane / 8 % 2) ^ lane % 8) * 16);
#endif
  };

#pragma unroll
  for (int chunk = 0; chunk < STAGES - 1; chunk++) fetch(chunk, chunk);
  wait_copies<STAGES - 2>();
  __syncthreads();
  float sums[FRAGMENTS][8][4] = {};
  Operands operands[2];
  read(operands[0], 0, 0);
  int stage = 0, to_stage = STAGES - 1;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; chunk++) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
      if (k == DEPTH / 16 - 1) {  // the next chunk has come, and all have read this one
        wait_copies<STAGES - 2>();
        __syncthreads();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
      }
      read(operands[(k + 1) % 2], stage, (k + 1) % (DEPTH / 16));
      if (k == 0) {
        fetch(chunk + STAGES - 1, to_stage);
        to_stage = to_stage + 1 == STAGES ? 0 : to_stage + 1;
      }
      multiply_all(sums, operands[k % 2]);
    }
  }

  wait_copies<0>();
  __syncthreads();
#if RANK
  constexpr int RANKS = (RANK + 15) / 16 * 16;  // of which the tensor cores take 16 at once
  for (int i = threadIdx.x; i < FRAGMENTS * 32 * (RANKS / 8); i += THREADS) {
    const int row = i / (RANKS / 8), v = i % (RANKS / 8);
    copy_vector(start + row * ROW_BYTES + (v ^ row % 8) * 16, hidden + int64_t(row) * RANK + v * 8,
                row < rows && v * 8 < RANK);
  }
  for (int i = threadIdx.x; i < RANKS * VECTORS; i += THREADS) {
    const int rank = i / VECTORS, v = i % VECTORS;
    copy_vector(start + ROWS * ROW_BYTES + rank * COLUMNS * 2 + (v ^ rank % 8) * 16,
                factors + int64_t(rank) * outputs + v * 8, rank < RANK && v * 8 < left);
  }
  commit_copies();
  wait_copies<0>();
  __syncthreads();
#pragma unroll
  for (int k = 0; k < RANKS / 16; k++) {
    Operands& own = operands[0];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
      load_matrices(own.left[f], read_left + f * 32 * ROW_BYTES + ((k * 2 + lane / 16) ^ lane % 8) * 16);
#pragma unroll
    for (int n = 0; n < 4; n++)
      load_transposed(own.right[n], start + ROWS * ROW_BYTES + (k * 16 + lane % 16) * COLUMNS * 2 + across * 128 +
                                        ((n * 2 + lane / 16) ^ lane % 8) * 16);
    multiply_all(sums, own);
  }
  __syncthreads();
#endif
  T* const results = reinterpret_cast<T*>(shared);
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < 8; n++)
        *reinterpret_cast<unsigned*>(results + (f * 32 + along * 16 + r * 8 + lane / 4) * PITCH + across * 64 + n * 8 +
                                     lane % 4 * 2) = packed(T(), sums[f][n][2 * r], sums[f][n][2 * r + 1]);
  __syncthreads();
  for (int i = threadIdx.x; i < rows * VECTORS; i += THREADS) {
    const int row = i / VECTORS, column = i % VECTORS * 8;
    if (column < left)
      *reinterpret_cast<uint4*>(y + int64_t(row) * outputs + column) =
          *reinterpret_cast<const uint4*>(results + row * PITCH + column);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    grouped_gemm(const T* x, const T* weights, const int4* tiles,
#if RANK
                 const T* hidden, const T* factors,
#endif
                 T* y, int depth, int outputs) {
  extern __shared__ __align__(128) char shared[];
  const int blocks = (outputs + COLUMNS - 1) / COLUMNS;  // beside each other they read the same rows
  const int4 tile = tiles[blockIdx.x / blocks];
  const int column = blockIdx.x % blocks * COLUMNS, rows = tile.z, left = outputs - column;
  if (rows == 0) return;
  const int64_t first = tile.y, expert = tile.x;
  x += first * depth;
  y += first * outputs + column;
#if TRANSPOSED
  weights += expert * depth * outputs + column;
#else
  weights += (expert * outputs + column) * depth;
#endif
#if RANK
  hidden += first * RANK;
  factors += expert * RANK * outputs + column;
#else
  const T *hidden = nullptr, *factors = nullptr;
#endif
  if (rows > 96)
    multiply_tile<4>(x, weights, hidden, factors, y, shared, rows, left, depth, outputs);
  else if (rows > 64)
    multiply_tile<3>(x, weights, hidden, factors, y, shared, rows, left, depth, outputs);
  else if (rows > 32)
    multiply_tile<2>(x, weights, hidden, factors, y, shared, rows, left, depth, outputs);
  else
    multiply_tile<1>(x, weights, hidden, factors, y, shared, rows, left, depth, outputs);
}
