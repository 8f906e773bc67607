// What delta_inputs.cu and its gradient share: a warp takes a head of queries, keys or values of TOKENS tokens, or
// their gates; a lane takes neighbouring channels.
constexpr int KEY_CHANNELS = KEY_HEADS * DK, CHANNELS = 2 * KEY_CHANNELS + HEADS * DV;
constexpr int UNITS = 2 * KEY_HEADS + HEADS + 1;

template <int SIZE>
struct alignas(SIZE * sizeof(T)) Few {
  T values[SIZE];
};

// Calls visit(unit, first token, last token) in the warps that have any.
template <class Visit>
__device__ __forceinline__ void visit_units(int tokens, Visit visit) {
  const int64_t warp = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int64_t first = warp / UNITS * TOKENS;
  if (first < tokens) visit(int(warp % UNITS), int(first), int(min(first + TOKENS, int64_t(tokens))));
}

__device__ __forceinline__ float of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Convolutions of a lane's channels, the first of which is `channel`.
template <int SIZE>
struct Convolution {
  const T* x;
  const int* sources;
  int channel;
  float factors[SIZE * K];

  __device__ __forceinline__ Convolution(const T* x, const T* weight, const int* sources, int channel)
      : x(x), sources(sources), channel(channel) {
#pragma unroll
    for (int i = 0; i < SIZE * K; i++) factors[i] = float(weight[channel * K + i]);
  }

  // The convolution at a token, of type T as float32.
  __device__ __forceinline__ void operator()(int token, float (&sums)[SIZE]) const {
#pragma unroll
    for (int j = 0; j < SIZE; j++) sums[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < K; i++) {
      const int source = sources[int64_t(token) * K + i];
      if (source < 0) continue;
      const Few<SIZE> few = *reinterpret_cast<const Few<SIZE>*>(x + int64_t(source) * CHANNELS + channel);
#pragma unroll
      for (int j = 0; j < SIZE; j++) sums[j] += float(few.values[j]) * factors[j * K + i];
    }
#pragma unroll
    for (int j = 0; j < SIZE; j++) sums[j] = float(T(sums[j]));
  }
};
