// The sum of an array over all ranks; see all_sum.py, and peer_sum.cuh for the protocol.
// Inputs `y` (N), and `memory`: the address of each rank's part, as this rank sees it. Output `sums` (N).
// T type of `y` and `sums`, THREADS of a block; RANKS, RANK, VECTORS, TURNS and EMPTY as in peer_sum.cuh.
#include "dependent.cuh"
#include "pack.cuh"
#include "peer_words.cuh"
#include "peer_sum.cuh"

extern "C" __global__ void all_sum(const T* y, const uint64_t* memory, T* sums, int size) {
  using P = Pack<T>;
  wait_for_inputs();
  const int64_t vector = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  const uint32_t call = next_call(memory, vector);
  if (vector * P::size >= size) return empty(memory, vector, call);
  P own = reinterpret_cast<const P*>(y)[vector];
  send(memory, vector, call, own);
  empty(memory, vector, call);  // while others send
  float total[P::size];
  receive(memory, vector, call, own, total);
  P rounded;
#pragma unroll
  for (int j = 0; j < P::size; j++) rounded.values[j] = T(total[j]);
  reinterpret_cast<P*>(sums)[vector] = rounded;
}
