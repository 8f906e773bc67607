// All B of a group's targets as one matrix: B of a target beside zeros for the outputs of the others.
// Inputs `starts` and `factors` (V, N), where B (R, O) of target s begins at `starts[1 + s]`. Output `joined` (V, K, TOTAL).
// T type, WIDTHS and RANKS of the TARGETS targets, K and TOTAL their sums. A thread has a vector of the output.
#include "pack.cuh"

extern "C" __global__ void block_diagonal(const int* starts, const T* factors, T* joined, int versions,
                                          int numbers_of_version) {
  using P = Pack<T>;
  constexpr int VECTORS = TOTAL / P::size, widths[] = {WIDTHS}, ranks[] = {RANKS};
  const int place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place >= versions * K * VECTORS) return;
  int output = place % VECTORS * P::size, row = place / VECTORS % K;
  P values = {};
#pragma unroll
  for (int s = 0; s < TARGETS; s++) {
    if (row >= 0 && row < ranks[s] && output >= 0 && output < widths[s])
      values = *reinterpret_cast<const P*>(factors + int64_t(place / VECTORS / K) * numbers_of_version + starts[1 + s] +
                                           row * widths[s] + output);
    row -= ranks[s];
    output -= widths[s];
  }
  reinterpret_cast<P*>(joined)[place] = values;
}
