// Copies pages to other pages of the same pool; a block copies a part of one page of one pool.
// T type; POINTERS are the parameters `pool0`, `pool1` ..., all of one shape, among which CASES choose a block's pool.

extern "C" __global__ void page_copy(POINTERS, const int* plan, int* done, int page_size, int num_copies) {
  using Pack16 = uint4;
  constexpr int SIZE = sizeof(Pack16) / sizeof(T);  // values that a thread moves at once
  const T* pool = pool0;
  switch (blockIdx.z) {
    CASES
  }
  const Pack16* source = reinterpret_cast<const Pack16*>(pool + int64_t(plan[blockIdx.x]) * page_size);
  Pack16* target = reinterpret_cast<Pack16*>(const_cast<T*>(pool) + int64_t(plan[num_copies + blockIdx.x]) * page_size);
  for (int at = blockIdx.y * blockDim.x + threadIdx.x; at < page_size / SIZE; at += gridDim.y * blockDim.x)
    target[at] = source[at];
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) done[0] = 0;
}
