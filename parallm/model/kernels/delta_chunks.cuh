// What the kernels of the gated delta rule share: float32 products of tiles on tensor cores, tiles of a chunk's tokens.
// A chunk has C tokens, of which some may be none (-1); heads have DK channels of keys and DV of values, of type T.
// Lines of tiles are longer than their values, so that lanes read different banks.
constexpr int ACROSS = 4, ALONG = THREADS / 32 / ACROSS;  // warps that share a product's columns, and its rows
constexpr bool EXACT = sizeof(T) == 2;                    // a number of type T is one of TF32
constexpr int KEYS = DK + 16 / sizeof(T), VALUES = DV + 16 / sizeof(T), SQUARE = C + 4;  // lines of tiles

struct alignas(2 * sizeof(T)) Pair {
  T x, y;
};

// The sums of a product (M, N): a warp has a part of the rows and columns, a lane pairs of neighbours.
template <int M, int N>
struct Sums {
  static constexpr int ROWS = M / ALONG, COLUMNS = N / ACROSS;
  float values[ROWS / 16][COLUMNS / 8][4];

  // visit(row, column, sum, sum of the next column)
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) {
    each_with(*this, [&](int m, int n, float& x, float& y, float, float) { visit(m, n, x, y); });
  }

  // The same with the numbers of another at the same places.
  template <class Visit>
  __device__ __forceinline__ void each_with(Sums& other, Visit visit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int f = 0; f < ROWS / 16; f++)
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          visit(warp / ACROSS * ROWS + f * 16 + half * 8 + lane / 4, warp % ACROSS * COLUMNS + n * 8 + lane % 4 * 2,
                values[f][n][half * 2], values[f][n][half * 2 + 1], other.values[f][n][half * 2],
                other.values[f][n][half * 2 + 1]);
  }
};

// A number as two whose fractions have 10 bits, and what is left of it.
struct Split {
  unsigned high, low;
  __device__ __forceinline__ Split(float x) {
    high = __float_as_uint(x) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
  }
};

// sums += left (M, K) right (K, N), functions of two indices. Sides whose numbers are those of TF32 are exact.
template <int K, bool LEFT_EXACT, bool RIGHT_EXACT, int M, int N, class Left, class Right>
__device__ __forceinline__ void add_product(Sums<M, N>& sums, Left left, Right right) {
  constexpr int ROWS = Sums<M, N>::ROWS, COLUMNS = Sums<M, N>::COLUMNS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / ACROSS * ROWS + lane / 4, column = warp % ACROSS * COLUMNS + lane / 4;
#pragma unroll 2
  for (int k = lane % 4; k < K; k += 8) {
    unsigned right_high[COLUMNS / 8][2], right_low[COLUMNS / 8][2];
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const Split split(right(k + i * 4, column + n * 8));
        right_high[n][i] = split.high, right_low[n][i] = split.low;
      }
#pragma unroll
    for (int f = 0; f < ROWS / 16; f++) {
      unsigned left_high[4], left_low[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const Split split(left(row + f * 16 + i % 2 * 8, k + i / 2 * 4));
        left_high[i] = split.high, left_low[i] = split.low;
      }
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++) {
        if (!RIGHT_EXACT) multiply_tf32(sums.values[f][n], left_high, right_low[n]);
        if (!LEFT_EXACT) multiply_tf32(sums.values[f][n], left_low, right_high[n]);
        multiply_tf32(sums.values[f][n], left_high, right_high[n]);
      }
    }
  }
}

// Two neighbours as float32.
struct Two {
  float x, y;
  template <class Number>
  __device__ __forceinline__ explicit Two(const Number* from) : x(float(from[0])), y(float(from[1])) {}
};

// The sum of each row, with the numbers times those of `weights(row, column)` and its neighbour; of a warp's columns,
// to parts (ACROSS, M).
template <int M, int N, class Weights>
__device__ __forceinline__ void sum_rows(float* parts, Sums<M, N>& sums, Weights weights) {
  constexpr int ROWS = Sums<M, N>::ROWS, COLUMNS = Sums<M, N>::COLUMNS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int f = 0; f < ROWS / 16; f++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = warp / ACROSS * ROWS + f * 16 + half * 8 + lane / 4;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++) {
        const Two two = weights(row, warp % ACROSS * COLUMNS + n * 8 + lane % 4 * 2);
        sum += sums.values[f][n][half * 2] * two.x + sums.values[f][n][half * 2 + 1] * two.y;
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0) parts[warp % ACROSS * M + row] = sum;
    }
}

// The sum of each column, of a warp's rows, to parts (ALONG, N).
template <int M, int N>
__device__ __forceinline__ void sum_columns(float* parts, Sums<M, N>& sums) {
  constexpr int ROWS = Sums<M, N>::ROWS, COLUMNS = Sums<M, N>::COLUMNS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float sum = 0.0f;
#pragma unroll
      for (int f = 0; f < ROWS / 16; f++) sum += sums.values[f][n][e] + sums.values[f][n][e + 2];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane < 4) parts[warp / ACROSS * N + warp % ACROSS * COLUMNS + n * 8 + lane * 2 + e] = sum;
    }
}

// Copies a chunk's tokens, SIZE values each and `stride` apart, to lines of a tile; zeros where there is none.
template <int SIZE, int LINE>
__device__ __forceinline__ void copy_tokens(T* to, const T* from, const int* tokens, int64_t stride) {
  constexpr int OF_VECTOR = 16 / sizeof(T), VECTORS = SIZE / OF_VECTOR;
  for (int i = threadIdx.x; i < C * VECTORS; i += THREADS) {
    const int token = tokens[i / VECTORS], at = i % VECTORS * OF_VECTOR;
    copy_vector(address_of(to + i / VECTORS * LINE + at), from + max(token, 0) * stride + at, token >= 0);
  }
}

// Copies lines of SIZE numbers, `stride` apart, to those of a tile.
template <int LINES, int SIZE, int LINE>
__device__ __forceinline__ void copy_lines(float* to, const float* from, int stride) {
  for (int i = threadIdx.x; i < LINES * SIZE / 4; i += THREADS) {
    const int line = i / (SIZE / 4), at = i % (SIZE / 4) * 4;
    copy_vector(address_of(to + line * LINE + at), from + int64_t(line) * stride + at, true);
  }
}

// The gates after token i up to token t at (t, i) of a tile, zero where i is later, from their logarithms.
__device__ __forceinline__ void put_gates(float* between, const float* logs) {
  constexpr int PARTS = THREADS / C, LINES = C / PARTS;
  const int own = threadIdx.x % C, first = threadIdx.x / C * LINES;
  float sum = 0.0f;
  for (int t = own + 1; t < first; t++) sum += logs[t];
  for (int t = first; t < first + LINES; t++) {
    if (t > own) sum += logs[t];
    between[t * SQUARE + own] = t < own ? 0.0f : expf(sum);
  }
}

__device__ __forceinline__ void put_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}
