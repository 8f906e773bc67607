// Parts that the kernels of flash attention share: tiles in shared memory, copies into them, products of them.
// HEAD: head size. REPEATS: query heads of a key head. WARPS: of a block, each with FRAGMENTS times 16 rows.
// COLUMNS: rows of a tile that streams through shared memory, STAGES of them at a time. BLOCKS: of an SM, at least.
constexpr int VECTORS = HEAD / 8;  // of 16 bytes, of a row
constexpr int PITCH = HEAD + 8;    // ldmatrix reads 8 rows without bank conflicts
constexpr int THREADS = 32 * WARPS, WARP_ROWS = 16 * FRAGMENTS, ROWS = WARP_ROWS * WARPS;
constexpr float LOG2E = 1.4426950408889634f;

template <int N>
using Tile = float[FRAGMENTS][N / 8][4];  // a warp's accumulators, WARP_ROWS by N

__device__ __forceinline__ unsigned pack_values(float low, float high) { return packed(T(), low, high); }

// sums (WARP_ROWS, N) += A (WARP_ROWS, HEAD) B^T, B (N, HEAD); both are rows in shared memory.
template <int N>
__device__ __forceinline__ void multiply_rows(Tile<N>& sums, unsigned a, unsigned b, int lane) {
#pragma unroll
  for (int k = 0; k < HEAD / 16; k++) {
    unsigned left[FRAGMENTS][4];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
      load_matrices(left[f], a + ((f * 16 + lane % 16) * PITCH + k * 16 + lane / 16 * 8) * 2);
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
      unsigned right[4];
      load_matrices(right, b + ((n * 16 + lane % 8 + lane / 16 * 8) * PITCH + k * 16 + lane / 8 % 2 * 8) * 2);
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        multiply<T>(sums[f][2 * n], left[f][0], left[f][1], left[f][2], left[f][3], right[0], right[1]);
        multiply<T>(sums[f][2 * n + 1], left[f][0], left[f][1], left[f][2], left[f][3], right[2], right[3]);
      }
    }
  }
}

// sums (WARP_ROWS, HEAD) += A (WARP_ROWS, K), accumulators that are rounded, times B (K, HEAD), rows in shared memory.
template <int K>
__device__ __forceinline__ void multiply_columns(Tile<HEAD>& sums, const Tile<K>& a, unsigned b, int lane) {
#pragma unroll
  for (int k = 0; k < K / 16; k++) {
    unsigned left[FRAGMENTS][4];  // accumulators of two neighbours lie as a product's left operand does
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      left[f][0] = pack_values(a[f][2 * k][0], a[f][2 * k][1]);
      left[f][1] = pack_values(a[f][2 * k][2], a[f][2 * k][3]);
      left[f][2] = pack_values(a[f][2 * k + 1][0], a[f][2 * k + 1][1]);
      left[f][3] = pack_values(a[f][2 * k + 1][2], a[f][2 * k + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < HEAD / 16; n++) {
      unsigned right[4];
      load_transposed(right, b + ((k * 16 + lane % 16) * PITCH + n * 16 + lane / 16 * 8) * 2);
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        multiply<T>(sums[f][2 * n], left[f][0], left[f][1], left[f][2], left[f][3], right[0], right[1]);
        multiply<T>(sums[f][2 * n + 1], left[f][0], left[f][1], left[f][2], left[f][3], right[2], right[3]);
      }
    }
  }
}

// Copies `rows` rows of each array, from the `offset` of each row, to shared memory; negative ones are zeros.
template <typename Offset>
__device__ __forceinline__ void copy_rows(T* to, T* other_to, int rows, const T* from, const T* other_from,
                                          Offset offset) {
  for (int i = threadIdx.x; i < rows * VECTORS; i += THREADS) {
    const int start = offset(i / VECTORS), at = max(0, start) + i % VECTORS * 8, place = i / VECTORS * PITCH + i % VECTORS * 8;
    copy_vector(address_of(to + place), from + at, start >= 0);
    if (other_to) copy_vector(address_of(other_to + place), other_from + at, start >= 0);
  }
}

// Writes a warp's sums to `to` plus each row's `offset`, none where negative, through the warp's own `rows` of shared memory.
template <typename Offset>
__device__ __forceinline__ void write_rows(T* rows, const Tile<HEAD>& sums, int lane, T* to, Offset offset) {
  __syncwarp();
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < HEAD / 8; n++)
        *reinterpret_cast<unsigned*>(rows + (f * 16 + r * 8 + lane / 4) * PITCH + n * 8 + lane % 4 * 2) =
            pack_values(sums[f][n][2 * r], sums[f][n][2 * r + 1]);
  __syncwarp();
  for (int i = lane; i < WARP_ROWS * VECTORS; i += 32) {
    const int start = offset(i / VECTORS);
    if (start >= 0)
      *reinterpret_cast<uint4*>(to + start + i % VECTORS * 8) =
          *reinterpret_cast<const uint4*>(rows + i / VECTORS * PITCH + i % VECTORS * 8);
  }
}

// A block's queries: ROWS packed rows of one sequence and key head, from `begin` on. Row m is token m / REPEATS of the
// sequence, head m % REPEATS of the group. Positions count the prefix that the sequence continues.
struct Queries {
  int head, heads, begin, rows, start, prefix_start, prefix, first, count, end;

  // tiles: (first token, tokens, first token of the prefix, its tokens; -1 for padding, which sees nothing), (begin, ..).
  // With pages the third number is where the sequence's own begin.
  __device__ Queries(const int4* tiles, int heads, int window) : heads(heads) {
    const int tile = blockIdx.x / heads;
    head = blockIdx.x % heads;
    const int4 sequence = tiles[2 * tile];
    begin = tiles[2 * tile + 1].x;
    rows = sequence.y * REPEATS, start = sequence.x, prefix_start = sequence.z, prefix = max(0, sequence.w);
    end = position(min(begin + ROWS, rows) - 1) + 1;
    first = max(0, position(begin) - window + 1) / COLUMNS;
    count = (end + COLUMNS - 1) / COLUMNS;
    if (sequence.w < 0) first = count = 0;
  }
  __device__ int position(int m) const { return prefix + m / REPEATS; }
  // index of a row among all tokens' query heads
  __device__ int row(int m) const {
    return ((start + m / REPEATS) * heads + head) * REPEATS + m % REPEATS;
  }
  // where a row begins; none after the last
  __device__ int offset(int m) const { return m < rows ? row(m) * HEAD : -1; }
  // Copies keys and values of tile `t` of positions.
  __device__ __forceinline__ void copy_keys(int t, T* keys, T* values, const T* k, const T* v) const {
    copy_rows(keys, values, COLUMNS, k, v, [&](int row) {
      const int at = t * COLUMNS + row, token = at < prefix ? prefix_start + at : start + at - prefix;
      return at < end ? (token * heads + head) * HEAD : -1;
    });
  }
  // The same from a page of COLUMNS positions.
  __device__ __forceinline__ void copy_page(int t, int page, T* keys, T* values, const T* k, const T* v) const {
    const int64_t start = (int64_t(page) * heads + head) * COLUMNS * HEAD;
    copy_rows(keys, values, COLUMNS, k + start, v + start,
              [&](int row) { return t * COLUMNS + row < end ? row * HEAD : -1; });
  }
};

// What a warp's rows see of a tile of positions.
struct View {
  int start, low, high, end, window;  // first position of the tile; of the warp's first and last token

  __device__ bool any() const { return start <= high && start + COLUMNS > low - window + 1; }
  __device__ bool all() const { return start + COLUMNS - 1 <= low && start > high - window; }
  __device__ bool sees(int token, int column) const {
    const int at = start + column;
    return at <= token && at < end && at > token - window;
  }
};
