// What the products of a step's rows with a linear layer's weights have in common (`small_batch_gemm.cu`,
// `warpgroup_gemm.cu`). T type of weights, Y of outputs; if GATED the outputs of a tile are those of both halves in turn.
constexpr int pitch_of(int tile) { return tile + 4; }  // of sums, float; what half a warp writes has all banks

// The row of the weights that a row of the tiles is.
__device__ __forceinline__ int output_of(int row, int outputs) {
  return GATED ? row / 2 + row % 2 * (outputs / 2) : row;
}

template <typename Out>
__device__ __forceinline__ void write(Out* to, const float* values) {
  struct alignas(16) Vector {
    Out values[8];
  } vector;
#pragma unroll
  for (int j = 0; j < 8; j++) vector.values[j] = Out(values[j]);
  *reinterpret_cast<Vector*>(to) = vector;
}

// Calls `visit(row, output of the tile, WIDTH sums)` for `rows` rows and what lies below `height`. `sums` are PARTS parts
// of HEIGHT rows each.
template <int TILE, int THREADS, int PARTS, int HEIGHT, int WIDTH, typename Visit>
__device__ __forceinline__ void for_sums(const float* sums, int rows, int height, Visit visit) {
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * (TILE / WIDTH); i += THREADS) {
    const int row = i / (TILE / WIDTH), of_tile = i % (TILE / WIDTH) * WIDTH;
    if (of_tile >= height) continue;
    float total[WIDTH] = {};
#pragma unroll
    for (int d = 0; d < PARTS; d++)
#pragma unroll
      for (int j = 0; j < WIDTH; j += 4) {
        const float4 part = *reinterpret_cast<const float4*>(sums + (d * HEIGHT + row) * pitch_of(TILE) + of_tile + j);
        total[j] += part.x;
        total[j + 1] += part.y;
        total[j + 2] += part.z;
        total[j + 3] += part.w;
      }
    visit(row, of_tile, total);
  }
}

// Writes sums of the tile that begins at output `first` of `height` to rows that are `width` apart.
template <int TILE, int THREADS, int PARTS, int HEIGHT>
__device__ __forceinline__ void write_sums(const float* sums, int rows, int first, int height, float* to, int width) {
  for_sums<TILE, THREADS, PARTS, HEIGHT, 8>(sums, rows, height - first, [&](int row, int of_tile, const float* total) {
    write(to + int64_t(row) * width + first + of_tile, total);
  });
}

// Writes outputs, `bias` added unless it is null; SwiGLU of both halves if GATED, each rounded before.
template <int TILE, int THREADS, int PARTS, int HEIGHT>
__device__ __forceinline__ void write_outputs(const float* sums, int rows, int first, int outputs, Y* y, const T* bias) {
  constexpr int WIDTH = GATED ? 16 : 8;  // sums of a vector that is written
  for_sums<TILE, THREADS, PARTS, HEIGHT, WIDTH>(sums, rows, outputs - first, [&](int row, int of_tile, float* total) {
    const int output = first + of_tile;
    if (bias != nullptr)
#pragma unroll
      for (int j = 0; j < WIDTH; j++) total[j] += float(bias[output_of(output + j, outputs)]);
#if GATED
    float products[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float gate = float(Y(total[2 * j]));
      products[j] = gate / (1.0f + __expf(-gate)) * float(Y(total[2 * j + 1]));
    }
    write(y + int64_t(row) * (outputs / 2) + output / 2, products);
#else
    write(y + int64_t(row) * outputs + output, total);
#endif
  });
}

#if PLUS
// Calls `lay(output of the tile, rank, value)` for B of each of the tile's outputs and the ranks of all targets, of which
// an output has its own target's alone: zeros for others. COLUMNS are the ranks, filled up.
template <int TILE, int COLUMNS, int THREADS, typename Lay>
__device__ __forceinline__ void lay_factors(const T* factors, const int* starts, int first, int outputs, Lay lay) {
  constexpr int widths[] = {WIDTHS}, ranks[] = {RANKS}, HALF = GATED ? TILE / 2 : TILE;  // outputs beside each other
#pragma unroll 1
  for (int i = threadIdx.x; i < COLUMNS * (TILE / 8); i += THREADS) {
    const int k = i / (TILE / 8), of_tile = i % (TILE / 8) * 8, beside = first * HALF / TILE + of_tile % HALF;
    const bool is_output = beside < (GATED ? outputs / 2 : outputs);
    int output = beside + of_tile / HALF * (outputs / 2), r = k;
    int own_width = widths[0], rank = ranks[0], target = 0;
#pragma unroll
    for (int s = 1; s < TARGETS; s++)
      if (output >= own_width) {
        output -= own_width;
        r -= rank;
        own_width = widths[s];
        rank = ranks[s];
        target = s;
      }
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (is_output && r >= 0 && r < rank)
      eight = *reinterpret_cast<const uint4*>(factors + starts[1 + target] + int64_t(r) * own_width + output);
#pragma unroll
    for (int j = 0; j < 8; j++)
      lay(GATED ? (of_tile % HALF + j) * 2 + of_tile / HALF : of_tile + j, k, reinterpret_cast<const T*>(&eight)[j]);
  }
}
#endif
