// A sublayer's output summed over all ranks, the residual stream after it, and its RMSNorm; see sum_add_norm.py, and
// peer_sum.cuh for the protocol.
// Inputs `y` (S, B, H) of type Y, parts of this rank's output that are still to be added up, the stream `other` (B, H)
// of type X before it, `weight` (H) of the norm, and `memory`: the address of each rank's part, as this rank sees it.
// Outputs `sums` (B, H), the stream after it in float32, and `normed` (B, H).
// T type of `weight`, of `normed` and of what ranks send, SPLITS parts, SIZE of H; a block has a row, each of its THREADS
// a vector; RANKS, RANK, VECTORS, TURNS and EMPTY as in peer_sum.cuh.
#include "dependent.cuh"
#include "pack.cuh"
#include "peer_words.cuh"
#include "peer_sum.cuh"
#include "row_scale.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    sum_add_norm(const Y* y, const X* other, const T* weight, const uint64_t* memory, float* sums, T* normed,
                 float eps, int rows) {
  using P = Pack<T>;
  struct alignas(16) Given {
    Y values[P::size];
  };
  struct alignas(sizeof(P)) Before {
    X values[P::size];
  };
  struct alignas(16) Stream {
    float values[P::size];
  };
  const P factors = reinterpret_cast<const P*>(weight)[threadIdx.x];
  wait_for_inputs();
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
  const Before before = reinterpret_cast<const Before*>(other)[vector];  // on the way while others send
  empty(memory, vector, call);
  float total[P::size];
  receive(memory, vector, call, own, total);
  Stream stream;
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < P::size; j++) {
    stream.values[j] = total[j] + float(before.values[j]);
    squares += stream.values[j] * stream.values[j];
  }
  reinterpret_cast<Stream*>(sums)[vector] = stream;
  const float scale = row_scale(squares, eps);
  P values;
#pragma unroll
  for (int j = 0; j < P::size; j++) values.values[j] = T(float(factors.values[j]) * (stream.values[j] * scale));
  reinterpret_cast<P*>(normed)[vector] = values;
}
