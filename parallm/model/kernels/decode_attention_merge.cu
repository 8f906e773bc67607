// Merges the parts of rows that several blocks of decode_attention.cu share. T type, D head size.

extern "C" __global__ void decode_attention_merge(const float* sums, const float* largests, const float* totals,
                                                  T* attended, int num_parts) {
  const int64_t place = int64_t(blockIdx.x) * num_parts;
  float most = -1e30f, all = 0.0f, found = 0.0f;
  for (int p = 0; p < num_parts; p++) most = fmaxf(most, largests[place + p]);
  for (int p = 0; p < num_parts; p++) {
    if (totals[place + p] == 0.0f) continue;  // a part without tokens, whose sums are not written
    float weight = exp2f(largests[place + p] - most);
    all += weight * totals[place + p];
    found += weight * sums[(place + p) * D + threadIdx.x];
  }
  attended[int64_t(blockIdx.x) * D + threadIdx.x] = T(found / all);
}
