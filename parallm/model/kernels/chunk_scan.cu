// States that pass through the chunks of rows; see chunk_scan.py.
//   U = V + by (R S^T)        S <- g S + with (U^T A), and M more if BACK
// where by = -1 and with = 1, or else by = 1 and with = -1 if BACK, when chunks are taken from the last to the first.
// A block takes a row's head and SLICE of the state's DV lines. Inputs, of chunks from `first` on: `values` V (N, H, C,
// DV), `reads` R and `adds` A (N, H, C, DK), `decay` g (N, H), or BY_CHANNEL (N, H, DK), `more` M (N, H, DV, DK); the
// states of the rows before their chunks, `initial` (B, H, DV, DK); `starts` (STEPS + 1), the chunk at which each step
// begins, with a chunk for each of its rows. Outputs: `states`, S before each chunk, `deltas`, U, and S after all.
// THREADS is 256. Lines of tiles in shared memory are PAD longer, so that lanes read different banks.
__device__ __forceinline__ void add_product(float& sum, float4 a, float4 b) {
  sum += a.x * b.x, sum += a.y * b.y, sum += a.z * b.z, sum += a.w * b.w;
}

extern "C" __global__ void __launch_bounds__(THREADS) chunk_scan(
    const float* values, const float* reads, const float* adds, const float* decay,
#if BACK
    const float* more,
#endif
    const float* initial, const int* starts, float* states, float* deltas, float* last, int first, int heads,
    int steps) {
  constexpr int SLICE = 32, PAD = 4, LINE = DK + PAD, VECTORS = DK / 4, OF_DELTA = SLICE + PAD;
  constexpr int LINES = (C + 31) / 32, UNITS = DK / 32 * 2;
  extern __shared__ __align__(16) float tiles[];
  float* read_tile = tiles;                  // C lines
  float* add_tile = read_tile + C * LINE;    // C lines
  float* state = add_tile + C * LINE;        // SLICE lines
  float* delta = state + SLICE * LINE;       // C lines of OF_DELTA
  const int slice = blockIdx.x % (DV / SLICE) * SLICE, row = blockIdx.x / (DV / SLICE) / heads;
  const int head = blockIdx.x / (DV / SLICE) % heads;
  const int64_t own = ((int64_t(row) * heads + head) * DV + slice) * DK;
  for (int i = threadIdx.x; i < SLICE * VECTORS; i += THREADS)
    reinterpret_cast<float4*>(state + i / VECTORS * LINE)[i % VECTORS] =
        reinterpret_cast<const float4*>(initial + own)[i];
  int count = 0;
  while (count < steps && row < starts[count + 1] - starts[count]) count++;
  __syncthreads();

  for (int n = 0; n < count; n++) {
    const int64_t place = (int64_t(starts[BACK ? count - 1 - n : n]) + row) * heads + head;
    const int64_t chunk = int64_t(first) * heads + place;
    for (int i = threadIdx.x; i < C * VECTORS; i += THREADS) {
      const int to = i / VECTORS * LINE / 4 + i % VECTORS;
      reinterpret_cast<float4*>(read_tile)[to] = reinterpret_cast<const float4*>(reads + chunk * C * DK)[i];
      reinterpret_cast<float4*>(add_tile)[to] = reinterpret_cast<const float4*>(adds + chunk * C * DK)[i];
    }
    for (int i = threadIdx.x; i < SLICE * VECTORS; i += THREADS)
      reinterpret_cast<float4*>(states + (place * DV + slice) * DK)[i] =
          reinterpret_cast<float4*>(state + i / VECTORS * LINE)[i % VECTORS];
    __syncthreads();

    // U: a thread takes 4 columns of every 32nd line
    const int line = threadIdx.x / 8, column = threadIdx.x % 8;
    if (line < C) {
      float sums[LINES][4] = {};
      for (int k = 0; k < VECTORS; k++) {
        float4 of_state[4];
#pragma unroll
        for (int j = 0; j < 4; j++) of_state[j] = reinterpret_cast<float4*>(state + (column + j * 8) * LINE)[k];
#pragma unroll
        for (int i = 0; i < LINES; i++) {
          const float4 of_read = reinterpret_cast<float4*>(read_tile + (line + i * 32) * LINE)[k];
#pragma unroll
          for (int j = 0; j < 4; j++) add_product(sums[i][j], of_read, of_state[j]);
        }
      }
#pragma unroll
      for (int i = 0; i < LINES; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int64_t at = (chunk * C + line + i * 32) * DV + slice + column + j * 8;
          const float sum = BACK ? values[at] + sums[i][j] : values[at] - sums[i][j];
          delta[(line + i * 32) * OF_DELTA + column + j * 8] = sum;
          deltas[at - int64_t(first) * heads * C * DV] = sum;
        }
    }
    __syncthreads();

    // S: a warp takes 16 lines of 32 channels, a thread 4 of 4
    for (int unit = threadIdx.x / 32; unit < UNITS; unit += THREADS / 32) {
      const int top = unit % 2 * 16 + threadIdx.x % 32 / 8 * 4, channel = unit / 2 * 32 + threadIdx.x % 8 * 4;
      float sums[4][4] = {};
      for (int c = 0; c < C; c++) {
        const float4 u = *reinterpret_cast<float4*>(delta + c * OF_DELTA + top);
        const float4 a = *reinterpret_cast<float4*>(add_tile + c * LINE + channel);
        const float of_line[4] = {u.x, u.y, u.z, u.w}, of_channel[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) sums[i][j] += of_line[i] * of_channel[j];
      }
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float gate = decay[BY_CHANNEL ? chunk * DK + channel + j : chunk];
          float& value = state[(top + i) * LINE + channel + j];
#if BACK
          value = gate * value - sums[i][j] + more[(chunk * DV + slice + top + i) * DK + channel + j];
#else
          value = gate * value + sums[i][j];
#endif
        }
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < SLICE * VECTORS; i += THREADS)
    reinterpret_cast<float4*>(last + own)[i] = reinterpret_cast<float4*>(state + i / VECTORS * LINE)[i % VECTORS];
}
