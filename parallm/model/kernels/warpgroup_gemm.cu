// small_batch_gemm.cu for more rows and warpgroups of sm_90a, with the same parameters and results: A of LoRA as more
// rows of the weights (HAS_LORA), SwiGLU of the outputs' halves (GATED), or products with B added (PLUS).
// T type of the input and the weights, Y of the sums, K columns of all A of a group (0: none). A block has WIDE warpgroups
// of 64 outputs each and takes ROWS rows, 64 or 128. 64 values of the input are fetched at once, STAGES fetches are under
// way or multiplied. WIDTHS and RANKS of the TARGETS targets; K is at most 64 if PLUS.
// Weights are the left factor and rows the right one: tensor cores take 64 of the former and ROWS of the latter.
// Blocks beside each other take other rows and the same weights.
#include "dependent.cuh"
#include "matrices.cuh"
#include "wgmma.cuh"
#include "gemm.cuh"
constexpr int GROUP = 128, TILE = 64 * WIDE, THREADS = GROUP * WIDE, CHUNK = 64;
constexpr int ROW_BYTES = CHUNK * 2, STAGE = (TILE + ROWS) * ROW_BYTES, EIGHT = 8 * ROW_BYTES;
constexpr int AT_ONCE = THREADS / 8, LINES = TILE / AT_ONCE;  // rows that a vector each is fetched of; those of a thread
constexpr int LINES_OF_ROWS = (ROWS + AT_ONCE - 1) / AT_ONCE;
constexpr int AHEAD = STAGES - 1;  // one is multiplied
static_assert(AHEAD > 0, "a chunk is under way");

// The output at a place of the tile: those in two places of a thread's sums are neighbours.
__device__ __forceinline__ int output_at(int place) { return place / 16 * 16 + place % 8 * 2 + place % 16 / 8; }
__device__ __forceinline__ int place_of(int output) { return output / 16 * 16 + output % 2 * 8 + output % 16 / 2; }

extern "C" __global__ void __launch_bounds__(128 * WIDE)
    warpgroup_gemm(const T* x, const T* weight,
#if HAS_BIAS
                   const T* bias,
#endif
#if HAS_LORA
                   const int* starts, const T* factors,
#endif
#if PLUS
                   const T* shrunk, const int* starts, const T* factors,
#endif
                   Y* y,
#if HAS_LORA
                   float* hidden, int versions, int numbers_of_version,
#endif
                   int all_rows, int width, int outputs, bool begins_early) {
  extern __shared__ __align__(1024) char shared[];
  const unsigned start = address_of(shared);
  const int row_blocks = (all_rows + ROWS - 1) / ROWS, block = blockIdx.x / row_blocks;
  const int above = blockIdx.x % row_blocks * ROWS, rows = min(all_rows - above, ROWS);
  const int chunks = (width + CHUNK - 1) / CHUNK;
  const int begin = chunks * blockIdx.y / gridDim.y, end = chunks * (blockIdx.y + 1) / gridDim.y;
#if HAS_LORA
  const int blocks = (outputs + TILE - 1) / TILE;
  const bool is_lora = block >= blocks;
  const int first = (block - (is_lora ? blocks : 0)) * TILE, columns = versions * K;
  const int height = is_lora ? columns : outputs;
  const T* matrix = is_lora ? factors + starts[0] : weight;
  const int64_t jump = is_lora ? numbers_of_version - int64_t(K) * width : 0;  // from one version to the next
  auto row_of = [&](int row) { return matrix + int64_t(row) * width + row / K * jump; };
#else
  const int first = block * TILE, height = outputs;
  auto row_of = [&](int row) { return weight + int64_t(output_of(row, outputs)) * width; };
#endif

  const int line = threadIdx.x / 8, vector = threadIdx.x % 8;
  const unsigned own = start + line * ROW_BYTES + (vector ^ line % 8) * 16;
  const T* from[LINES];
#pragma unroll
  for (int i = 0; i < LINES; i++)
    from[i] = row_of(min(first + output_at(line + i * AT_ONCE), height - 1)) + vector * 8;
  const T* from_rows = x + int64_t(above + line) * width + vector * 8;
  auto has_row = [&](int i) { return ROWS % AT_ONCE == 0 || line + i * AT_ONCE < ROWS; };
  auto fetch = [&](int chunk, bool has_weights, bool has_rows) {
    if (chunk < end) {
      const unsigned to = own + (chunk - begin) % STAGES * STAGE;
      const int at = chunk * CHUNK;
      const bool is_inside = at + vector * 8 < width;
      if (has_weights)
#pragma unroll
        for (int i = 0; i < LINES; i++)
          copy_vector(to + i * AT_ONCE * ROW_BYTES, from[i] + at,
                      is_inside && first + output_at(line + i * AT_ONCE) < height);
      if (has_rows)
#pragma unroll
        for (int i = 0; i < LINES_OF_ROWS; i++)
          if (has_row(i))
            copy_vector(to + (TILE + i * AT_ONCE) * ROW_BYTES, from_rows + int64_t(i) * AT_ONCE * width + at,
                        is_inside && line + i * AT_ONCE < rows);
    }
    commit_copies();
  };

  // While the kernel in front may still run, weights are fetched, which no kernel writes
  if (begins_early)
    for (int i = 0; i < AHEAD; i++) fetch(begin + i, true, false);
#if PLUS
  constexpr int DEEP = (K + 15) / 16;  // ranks that tensor cores take at once
  static_assert(K <= CHUNK, "the ranks fit in a chunk");
  constexpr unsigned RANKS_AT = STAGES * STAGE;
  lay_factors<TILE, DEEP * 16, THREADS>(factors, starts, first, outputs, [&](int output, int rank, T value) {
    const int place = place_of(output);
    *reinterpret_cast<T*>(shared + RANKS_AT + place * ROW_BYTES + (rank / 8 ^ place % 8) * 16 + rank % 8 * 2) = value;
  });
#endif
  wait_for_inputs();
#if PLUS
#pragma unroll
  for (int i = 0; i < LINES_OF_ROWS; i++)
    if (const int row = line + i * AT_ONCE; has_row(i))
      copy_vector(own + RANKS_AT + (TILE + i * AT_ONCE) * ROW_BYTES, shrunk + int64_t(above + row) * K + vector * 8,
                  row < rows && vector * 8 < K);
#endif
  for (int i = 0; i < AHEAD; i++) fetch(begin + i, !begins_early, true);

  float sums[ROWS / 2] = {};
  const int group = threadIdx.x / GROUP;
  auto multiply = [&](unsigned at, int k) {
    const unsigned own_weights = start + at + group * 64 * ROW_BYTES, rows_at = start + at + TILE * ROW_BYTES;
    Products<T>::add_rows(sums, describe(own_weights + k * 32, 16, EIGHT), describe(rows_at + k * 32, 16, EIGHT), true);
  };
#pragma unroll 1
  for (int chunk = begin; chunk < end; chunk++) {
    wait_copies<AHEAD - 1>();
    show_copies();
    wait_products<0>();  // all have read the chunk before, once all are here
    __syncthreads();
    begin_products();
#if PLUS
    if (chunk == begin)
#pragma unroll
      for (int k = 0; k < DEEP; k++) multiply(RANKS_AT, k);
#endif
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++) multiply((chunk - begin) % STAGES * STAGE, k);
    commit_products();
    fetch(chunk + AHEAD, true, true);
  }
  wait_products<0>();
  hold(sums);
  __syncthreads();

  constexpr int PITCH = pitch_of(TILE);
  float* const results = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++)
      *reinterpret_cast<float2*>(results + (n * 8 + lane % 4 * 2 + odd) * PITCH + warp * 16 + lane / 4 * 2) =
          make_float2(sums[n * 4 + odd], sums[n * 4 + 2 + odd]);
  __syncthreads();
  const int64_t at = int64_t(blockIdx.y) * all_rows + above;
#if HAS_LORA
  if (is_lora) {
    write_sums<TILE, THREADS, 1, ROWS>(results, rows, first, height, hidden + at * columns, columns);
    return;
  }
#endif
  Y* const to = y + at * (GATED ? outputs / 2 : outputs);
#if HAS_BIAS
  write_outputs<TILE, THREADS, 1, ROWS>(results, rows, first, outputs, to, blockIdx.y == 0 ? bias : nullptr);
#else
  write_outputs<TILE, THREADS, 1, ROWS>(results, rows, first, outputs, to, nullptr);
#endif
}
