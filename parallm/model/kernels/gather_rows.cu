// Rows of `source` that `indices` name: each `picks` outputs in turn choose among the next `group` rows; 0: among all.
// T type; UNIT is what a thread moves, `width` the units of a row.
#include "dependent.cuh"

extern "C" __global__ void gather_rows(const T* source, const int* indices, T* rows, int num_rows, int width, int picks,
                                       int group) {
  wait_for_inputs();
  const int64_t place = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, row = place / width;
  if (row >= num_rows) return;
  const int64_t chosen = row / picks * group + indices[row];
  reinterpret_cast<UNIT*>(rows)[place] = reinterpret_cast<const UNIT*>(source)[chosen * width + place % width];
}
