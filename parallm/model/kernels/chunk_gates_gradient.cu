// The gradient of chunk_gates.cu with respect to `log_a`, given its outputs and their cotangents.
// A number of `between` at (t, i) has a part in all tokens after i up to t. A thread takes a line, and then a column.
extern "C" __global__ void chunk_gates_gradient(const float* from_start, const float* to_end, const float* between,
                                                const float* of_start, const float* of_end, const float* of_between,
                                                float* gradient, int chunks) {
  __shared__ float parts[CHUNKS][C][C + 1], starts[CHUNKS][C], ends[CHUNKS][C];
  const int place = threadIdx.x / C, own = threadIdx.x % C;
  const int64_t chunk = int64_t(blockIdx.x) * CHUNKS + place;
  if (chunk < chunks) {
    for (int t = 0; t < C; t++) {
      const int64_t at = (chunk * C + t) * C + own;
      parts[place][t][own] = own < t ? between[at] * of_between[at] : 0.0f;
    }
    starts[place][own] = from_start[chunk * C + own] * of_start[chunk * C + own];
    ends[place][own] = to_end[chunk * C + own] * of_end[chunk * C + own];
  }
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < C; i++) {  // of all columns before i, in the place of i
    const float part = parts[place][own][i];
    parts[place][own][i] = sum;
    sum += part;
  }
  __syncthreads();
  if (chunk >= chunks) return;
  sum = 0.0f;
  for (int t = 0; t < C; t++) sum += t >= own ? parts[place][t][own] + starts[place][t] : ends[place][t];
  gradient[chunk * C + own] = sum;
}
