// Products of few rows with a linear layer's weights and with all A of LoRA.
// Inputs `x` (B, T, I), `weight` (O, I), if HAS_BIAS `bias` (O,), if HAS_LORA `starts` and `factors` (V, N), where A
// (K, I) of a version begins at `starts[0]`. Outputs `y` (S, B, T, O) and if HAS_LORA `hidden` (S, B, T, V K): sums
// over parts of the input, for all versions. If GATED `y` (B, T, O / 2) is SwiGLU of the outputs' halves: silu of an output
// of the first half by its counterpart, both rounded to Y before; their weights lie beside each other in a tile.
// If PLUS (only for whole outputs, never with HAS_LORA), the products of `shrunk` (B, K) with B of the only version are
// added: that of target s (R, O) begins at `starts[1 + s]`, and reads the columns of its own A.
// O is a multiple of 8, that of each half or target, too, and so are K and all ranks.
// T type of the input and the weights, Y of the sums, K columns of all A of a group (0: none); WIDE warps side by side
// compute 16 outputs each, DEEP of them share each sum; TILES of 8 rows; CHUNK values of the input are fetched at once,
// STAGES such fetches are under way. WIDTHS and RANKS of the TARGETS targets.
// Weights are the left factor and rows the right one: the tensor cores take 16 of the former and 8 of the latter. Which
// values of the input meet in one instruction does not matter as long as both sides agree, so a lane takes 16 bytes of
// each at once. Blocks after the last output compute rows of A in the same way.
#include "dependent.cuh"
#include "mma.cuh"
#include "gemm.cuh"

extern "C" __global__ void __launch_bounds__(32 * WIDE * DEEP)
    small_batch_gemm(const T* x, const T* weight,
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
                     int rows, int width, int outputs, bool begins_early) {
  constexpr int TILE = 16 * WIDE, THREADS = 32 * WIDE * DEEP;
  constexpr int VECTORS = CHUNK / 8, AT_ONCE = THREADS / VECTORS;  // of a row; rows that a vector each is fetched of
  constexpr int PITCH = CHUNK * 2 + 32, PITCH_X = CHUNK * 2 + 64;  // what a quarter of a warp reads has all banks
  constexpr int STAGE = TILE * PITCH + TILES * 8 * PITCH_X;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  const int across = warp % WIDE, along = warp / WIDE;
  const int chunks = (width + CHUNK - 1) / CHUNK;
  const int begin = chunks * blockIdx.y / gridDim.y, end = chunks * (blockIdx.y + 1) / gridDim.y;
#if HAS_LORA
  const int blocks = (outputs + TILE - 1) / TILE;
  const bool is_lora = blockIdx.x >= blocks;
  const int first = (blockIdx.x - (is_lora ? blocks : 0)) * TILE, columns = versions * K;
  const int height = is_lora ? columns : outputs;
  const T* matrix = is_lora ? factors + starts[0] : weight;
  const int64_t jump = is_lora ? numbers_of_version - int64_t(K) * width : 0;  // from one version to the next
  auto row_of = [&](int row) { return matrix + int64_t(row) * width + row / K * jump; };
#else
  const int first = blockIdx.x * TILE, height = outputs;
  auto row_of = [&](int row) { return weight + int64_t(output_of(row, outputs)) * width; };
#endif
  extern __shared__ __align__(128) char shared[];
  const int column = threadIdx.x % VECTORS, line = threadIdx.x / VECTORS;
#if PLUS
  // LoRA's ranks are a chunk after the last one. B lies there as in memory, its outputs beside each other.
  constexpr int widths[] = {WIDTHS}, ranks[] = {RANKS}, COLUMNS = (K + 31) / 32 * 32;
  static_assert(COLUMNS <= CHUNK, "the ranks fit in a chunk");
  int starts_of[TARGETS];
#pragma unroll
  for (int s = 0; s < TARGETS; s++) starts_of[s] = starts[1 + s];
  auto fetch_ranks = [&](char* to) {
    constexpr int SIDE = GATED ? TILE / 2 : TILE;  // outputs beside each other
#pragma unroll 1
    for (int i = threadIdx.x; i < COLUMNS * (TILE / 8); i += THREADS) {
      const int k = i / (TILE / 8), of_tile = i % (TILE / 8) * 8, beside = first * SIDE / TILE + of_tile % SIDE;
      const bool is_output = beside < (GATED ? outputs / 2 : outputs);
      int output = beside + of_tile / SIDE * (outputs / 2), r = k;
      int own_width = widths[0], rank = ranks[0], start = starts_of[0];
#pragma unroll
      for (int s = 1; s < TARGETS; s++)
        if (output >= own_width) {
          output -= own_width;
          r -= rank;
          own_width = widths[s];
          rank = ranks[s];
          start = starts_of[s];
        }
      char* at = to + (k * TILE + of_tile) * 2;
      if (is_output && r >= 0 && r < rank)
        copy_async(static_cast<unsigned>(__cvta_generic_to_shared(at)), factors + start + int64_t(r) * own_width + output);
      else
        *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * (COLUMNS / 8); i += THREADS) {
      const int row = i / (COLUMNS / 8), k = i % (COLUMNS / 8) * 8;
      char* at = to + TILE * PITCH + row * PITCH_X + k * 2;
      if (k < K)
        copy_async(static_cast<unsigned>(__cvta_generic_to_shared(at)), shrunk + int64_t(row) * K + k);
      else
        *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
    }
  };
  // Eight ranks' numbers for an output, from rank k on
  auto ranks_of = [&](const char* from, int of_tile, int k) {
    const unsigned short* numbers = reinterpret_cast<const unsigned short*>(from) + k * TILE + of_tile;
    auto pair = [&](int j) { return numbers[j * TILE] | unsigned(numbers[(j + 1) * TILE]) << 16; };
    return make_uint4(pair(0), pair(2), pair(4), pair(6));
  };
#endif
  auto fetch = [&](int chunk, int stage, bool has_weights, bool has_rows) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + stage * STAGE + column * 16;
    const int i = chunk * CHUNK + column * 8;
    if (chunk < end && i < width) {
      if (has_weights)
#pragma unroll
        for (int r = line; r < TILE; r += AT_ONCE)
          if (first + r < height) copy_async(to + r * PITCH, row_of(first + r) + i);
      if (has_rows)
#pragma unroll
        for (int r = line; r < TILES * 8; r += AT_ONCE)
          if (r < rows) copy_async(to + TILE * PITCH + r * PITCH_X, x + int64_t(r) * width + i);
    }
#if PLUS
    if (has_rows && chunk == end) fetch_ranks(shared + stage * STAGE);
#endif
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  float sum[TILES][4] = {};
  int stage = 0;  // of the chunk that is fetched
#pragma unroll 1
  for (int step = (1 - STAGES) * (1 + begins_early); step < end - begin + PLUS; step++) {
    // First STAGES - 1 chunks, then another one for each that is multiplied. While the kernel in front may still run, it
    // is the weights of those chunks, which no kernel writes, and then their rows.
    const bool has_rows = step > -STAGES;
    if (step == 1 - STAGES) {
      wait_for_inputs();
      stage = 0;
    }
    if (step >= 0) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
      __syncthreads();
    }
    fetch(begin + step + (has_rows ? 1 : 2) * (STAGES - 1), stage, !begins_early || !has_rows || step >= 0, has_rows);
    stage = stage == STAGES - 1 ? 0 : stage + 1;  // and of the one that is multiplied
    if (step < 0) continue;
    const int chunk = begin + step;
    const char* weights = shared + stage * STAGE + (across * 16 + group * 2) * PITCH + quad * 16;
    const char* given = shared + stage * STAGE + TILE * PITCH + group * PITCH_X + quad * 16;
    int units = (width - chunk * CHUNK) / 32;
#if PLUS
    if (chunk == end) units = COLUMNS / 32;
#endif
#pragma unroll
    for (int unit = along; unit < CHUNK / 32; unit += DEEP) {
      if (unit >= units) break;
      uint4 even = *reinterpret_cast<const uint4*>(weights + unit * 64);
      uint4 odd = *reinterpret_cast<const uint4*>(weights + PITCH + unit * 64);
#if PLUS
      if (chunk == end) {
        const int of_tile = across * 16 + group * 2, k = unit * 32 + quad * 8;
        even = ranks_of(shared + stage * STAGE, GATED ? of_tile / 2 : of_tile, k);
        odd = ranks_of(shared + stage * STAGE, GATED ? of_tile / 2 + TILE / 2 : of_tile + 1, k);
      }
#endif
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        const uint4 row = *reinterpret_cast<const uint4*>(given + n * 8 * PITCH_X + unit * 64);
        multiply<T>(sum[n], even.x, odd.x, even.y, odd.y, row.x, row.y);
        multiply<T>(sum[n], even.z, odd.z, even.w, odd.w, row.z, row.w);
      }
    }
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  constexpr int PITCH_SUMS = pitch_of(TILE);
  float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const int row = along * TILES * 8 + n * 8 + quad * 2 + odd;
      *reinterpret_cast<float2*>(sums + row * PITCH_SUMS + across * 16 + group * 2) =
          make_float2(sum[n][odd], sum[n][2 + odd]);
    }
  __syncthreads();
  const int64_t at = int64_t(blockIdx.y) * rows;
#if HAS_LORA
  if (is_lora) {
    write_sums<TILE, THREADS, DEEP, TILES * 8>(sums, rows, first, height, hidden + at * columns, columns);
    return;
  }
#endif
  Y* const to = y + at * (GATED ? outputs / 2 : outputs);
#if HAS_BIAS
  write_outputs<TILE, THREADS, DEEP, TILES * 8>(sums, rows, first, outputs, to, blockIdx.y == 0 ? bias : nullptr);
#else
  write_outputs<TILE, THREADS, DEEP, TILES * 8>(sums, rows, first, outputs, to, nullptr);
#endif
}
