// Weights to draw from: zero after the ends that filter_ends.cu found, and below min-p.

extern "C" __global__ void filter_weights(const float* scaled, const float* exponentials, const float* lowest,
                                          const int* last, const float* least, float* weights) {
  int id = blockIdx.x * blockDim.x + threadIdx.x;
  if (id >= V) return;
  int64_t row = blockIdx.y, place = row * V + id;
  float value = scaled[place], weight = exponentials[place];
  bool is_kept = value > lowest[row] || (value == lowest[row] && id <= last[row]);
  weights[place] = is_kept && weight >= least[row] ? weight : 0.0f;
}
