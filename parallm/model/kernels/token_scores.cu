// Log-probability and entropy of one token of each row of logits (N, V) over `divisor`, and the row's logsumexp.
// T type of the logits. A block reads a row once.

extern "C" __global__ void token_scores(const T* logits, const float* divisor, const int* tokens, float* logprobs,
                                        float* entropies, float* logsumexp) {
  // The largest so far, and sums of exp(value - largest) and of that times the value; -INFINITY adds nothing to them.
  __shared__ float largests[32], sums[32], products[32];
  int64_t row = blockIdx.x;
  const T* values = logits + row * V;
  float scale = 1.0f / divisor[row], largest = -INFINITY, sum = 0.0f, product = 0.0f;
  for (int i = threadIdx.x; i < V; i += blockDim.x) {
    float value = float(values[i]) * scale;
    if (value > largest) {
      float shrunk = expf(largest - value);
      sum *= shrunk;
      product *= shrunk;
      largest = value;
    }
    if (value != -INFINITY) {
      float e = expf(value - largest);
      sum += e;
      product += e * value;
    }
  }
  auto merge = [&](float other_largest, float other_sum, float other_product) {
    float both = fmaxf(largest, other_largest);
    if (both == -INFINITY) return;
    float mine = expf(largest - both), others = expf(other_largest - both);
    sum = sum * mine + other_sum * others;
    product = product * mine + other_product * others;
    largest = both;
  };
  for (int step = 16; step > 0; step /= 2)
    merge(__shfl_down_sync(0xffffffff, largest, step), __shfl_down_sync(0xffffffff, sum, step),
          __shfl_down_sync(0xffffffff, product, step));
  int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
    largests[warp] = largest;
    sums[warp] = sum;
    products[warp] = product;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int other = 1; other < blockDim.x / 32; other++) merge(largests[other], sums[other], products[other]);
    float all = largest + logf(sum);
    logsumexp[row] = all;
    logprobs[row] = float(values[tokens[row]]) * scale - all;
    entropies[row] = all - product / sum;
  }
}
