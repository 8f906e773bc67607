// Log-probability and entropy of one token of each row of logits (N, V) over `divisor`, and the row's logsumexp.
// T type of the logits. A block reads a row once, each thread several vectors at a time.
#include "pack.cuh"

extern "C" __global__ void token_scores(const T* logits, const float* divisor, const int* tokens, float* logprobs,
                                        float* entropies, float* logsumexp) {
  using P = Pack<T>;
  constexpr int AT_ONCE = 4;
  // The largest so far, and sums of exp(value - largest) and of that times the value; -INFINITY adds nothing to them.
  __shared__ float largests[32], sums[32], products[32];
  int64_t row = blockIdx.x;
  const T* values = logits + row * V;
  float scale = 1.0f / divisor[row], largest = -INFINITY, sum = 0.0f, product = 0.0f;
  auto raise = [&](float value) {
    if (value <= largest) return;
    float shrunk = expf(largest - value);
    sum *= shrunk;
    product *= shrunk;
    largest = value;
  };
  auto add = [&](float value) {
    if (value == -INFINITY) return;
    float e = expf(value - largest);
    sum += e;
    product += e * value;
  };
  auto take = [&](int column) {
    float value = float(values[column]) * scale;
    raise(value);
    add(value);
  };
  // a row may begin and end within a vector
  const int skipped = int(reinterpret_cast<uintptr_t>(values) % sizeof(P) / sizeof(T));
  const int before = min(V, skipped ? P::size - skipped : 0), vectors = (V - before) / P::size;
  const P* whole = reinterpret_cast<const P*>(values + before);
  if (threadIdx.x < before) take(threadIdx.x);
  for (int first = threadIdx.x; first < vectors; first += AT_ONCE * blockDim.x) {
    P packs[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
      if (first + k * int(blockDim.x) < vectors) packs[k] = whole[first + k * blockDim.x];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      if (first + k * int(blockDim.x) >= vectors) break;
      float scaled[P::size], largest_of_pack = -INFINITY;
#pragma unroll
      for (int j = 0; j < P::size; j++) {
        scaled[j] = float(packs[k].values[j]) * scale;
        largest_of_pack = fmaxf(largest_of_pack, scaled[j]);
      }
      raise(largest_of_pack);
#pragma unroll
      for (int j = 0; j < P::size; j++) add(scaled[j]);
    }
  }
  const int after = before + vectors * P::size + threadIdx.x;
  if (after < V) take(after);
  auto merge = [&](float other_largest, float other_sum, float other_product) {
    float both = fmaxf(largest, other_largest);
    if (both == -INFINITY) return;
    float mine = expf(largest - both), others = expf(other_largest - both);
    sum = sum * mine + other_sum * others;
    product = product * mine + other_product * others;
    largest = both;
  };
  for (int step = 16; step > 0; step /= 2)
    merge(__shfl_xor_sync(0xffffffffu, largest, step), __shfl_xor_sync(0xffffffffu, sum, step),
          __shfl_xor_sync(0xffffffffu, product, step));
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
