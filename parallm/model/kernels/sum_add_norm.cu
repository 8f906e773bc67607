// A sublayer's output summed over all ranks, the residual stream after it, and its RMSNorm; see sum_add_norm.py, and
// peer_sum.cuh for the protocol.
// Inputs `y` (S, B, H) of type Y, parts of this rank's output that are still to be added up, the stream `other` (B, H)
// before it, `weight` (H) of the norm, and `memory`: the address of each rank's part, as this rank sees it. Outputs
// `sums` (B, H), rounded once after each rank's output, and `normed` (B, H).
// T type of all arrays but the parts, SPLITS parts, SIZE of H; a block has a row, each of its THREADS a vector; RANKS,
// RANK own number, VECTORS that a part has room for.
#include "pack.cuh"
#include "peer_words.cuh"
#include "peer_sum.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    sum_add_norm(const Y* y, const T* other, const T* weight, const uint64_t* memory, T* sums, T* normed, float eps,
                 int rows) {
  using P = Pack<T>;
  struct alignas(16) Given {
    Y values[P::size];
  };
  constexpr int warps = THREADS / 32;
  __shared__ float of_warp[warps];
  const int64_t vector = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  Given given[SPLITS];  // on the way while the call's number is
#pragma unroll
  for (int s = 0; s < SPLITS; s++) given[s] = reinterpret_cast<const Given*>(y)[int64_t(s) * rows * THREADS + vector];
  const uint32_t call = next_call(memory, vector);
  P own;
#pragma unroll
  for (int j = 0; j < P::size; j++) {
    float sum = float(given[0].values[j]);
#pragma unroll
    for (int s = 1; s < SPLITS; s++) sum += float(given[s].values[j]);
    own.values[j] = T(sum);
  }
  send(memory, vector, call, own);
  const P before = reinterpret_cast<const P*>(other)[vector];  // on the way while others send
  const P factors = reinterpret_cast<const P*>(weight)[threadIdx.x];
  float total[P::size];
  receive(memory, vector, call, own, total);
  P stream;
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < P::size; j++) {
    stream.values[j] = T(total[j] + float(before.values[j]));
    const float value = float(stream.values[j]);
    squares += value * value;
  }
  reinterpret_cast<P*>(sums)[vector] = stream;
  auto added = [](float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
  };
  squares = added(squares);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = added(threadIdx.x % 32 < warps ? of_warp[threadIdx.x % 32] : 0.0f);
  const float scale = rsqrtf(squares / SIZE + eps);
  P values;
#pragma unroll
  for (int j = 0; j < P::size; j++)
    values.values[j] = T(float(factors.values[j]) * float(T(float(stream.values[j]) * scale)));
  reinterpret_cast<P*>(normed)[vector] = values;
}
