// Copies arrays of words of 32 bits into others, in place. `sharing` blocks copy an array, and when each has copied its
// part, it adds 1 to the word at the address that comes in two halves, unless that is 0.
// POINTERS are the parameters `source0`, `target0`, `source1`, `target1` ...; CASES choose among them.

extern "C" __global__ void copy_into(POINTERS, const int* counts, int* done, int sharing, int low, int high) {
  const int pair = blockIdx.x / sharing;
  const void *source = source0, *target = target0;
  switch (pair) {
    CASES
  }
  int* words = static_cast<int*>(const_cast<void*>(target));
  for (int i = blockIdx.x % sharing * blockDim.x + threadIdx.x; i < counts[pair]; i += sharing * blockDim.x)
    words[i] = static_cast<const int*>(source)[i];
  int* arrived = reinterpret_cast<int*>(uint64_t(uint32_t(high)) << 32 | uint32_t(low));
  __threadfence();
  __syncthreads();
  if (threadIdx.x > 0) return;
  if (arrived != nullptr) atomicAdd(arrived, 1);
  if (blockIdx.x == 0) done[0] = 0;
}
