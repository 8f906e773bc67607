// Merges the parts of rows that several blocks of decode_attention.cu share. T type, D head size. Rows have `heads` query
// heads, and parts `part` positions: those after a row's length have no tokens.

extern "C" __global__ void decode_attention_merge(const float* sums, const float* largests, const float* totals,
                                                  const int* lengths, T* attended, int num_parts, int part, int heads) {
  const int64_t place = int64_t(blockIdx.x) * num_parts;
  const int used = min(num_parts, lengths[blockIdx.x / heads] / part + 1);
  float most = -1e30f, all = 0.0f, found = 0.0f;
#pragma unroll 8
  for (int p = 0; p < used; p++) most = fmaxf(most, largests[place + p]);
#pragma unroll 8
  for (int p = 0; p < used; p++) {
    const float total = totals[place + p], weight = exp2f(largests[place + p] - most);
    const float sum = sums[(place + p) * D + threadIdx.x];
    if (total > 0.0f) {  // a part before the window has no tokens, and its sums are not written
      all += weight * total;
      found += weight * sum;
    }
  }
  attended[int64_t(blockIdx.x) * D + threadIdx.x] = T(found / all);
}
