// Products of gates within chunks; see chunk_gates.py.
// Input `log_a` (N, C). Outputs `from_start` (N, C), the gates up to a token, `to_end` (N, C), those after it, and
// `between` (N, C, C), those after token i up to token t at (t, i), zero where i is later. A thread takes a token of one
// of a block's CHUNKS.
extern "C" __global__ void chunk_gates(const float* log_a, float* from_start, float* to_end, float* between, int chunks) {
  __shared__ float logs[CHUNKS][C];
  const int64_t chunk = int64_t(blockIdx.x) * CHUNKS + threadIdx.x / C;
  const int own = threadIdx.x % C;
  const float* of_chunk = logs[threadIdx.x / C];
  if (chunk < chunks) logs[threadIdx.x / C][own] = log_a[chunk * C + own];
  __syncthreads();
  if (chunk >= chunks) return;
  float before = 0.0f, after = 0.0f;
  for (int t = 0; t < C; t++) {
    before += t <= own ? of_chunk[t] : 0.0f;
    after += t > own ? of_chunk[t] : 0.0f;
    between[(chunk * C + t) * C + own] = t < own ? 0.0f : expf(after);
  }
  from_start[chunk * C + own] = expf(before);
  to_end[chunk * C + own] = expf(after);
}
