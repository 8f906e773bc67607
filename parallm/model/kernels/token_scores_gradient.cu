// The gradient from log-probabilities and entropies of token_scores.cu back to the logits.

extern "C" __global__ void token_scores_gradient(const T* logits, const float* divisor, const int* tokens,
                                                 const float* logsumexp, const float* entropies, const float* gradient,
                                                 const float* entropy_gradient, T* found, int rows) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= V) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    int64_t place = row * V + column;
    float scale = 1.0f / divisor[row];
    float logprob = float(logits[place]) * scale - logsumexp[row], probability = expf(logprob);
    float chosen = column == tokens[row] ? 1.0f : 0.0f;
    float slope = gradient[row] * (chosen - probability);
    if (entropy_gradient[row] != 0.0f && probability > 0.0f)
      slope -= entropy_gradient[row] * probability * (logprob + entropies[row]);
    found[place] = T(slope * scale);
  }
}
