// Copies computed prompts into slots; a block copies a part of one head of one row of one array.
// T type; POINTERS are the parameters `prompt0`, `prompt1` ... and `pool0`, `pool1` ..., all of one shape, among which
// CASES choose a block's array.

extern "C" __global__ void slot_copy_in(POINTERS, const int* plan, int* done, int heads, int size, int num_rows,
                                        int prompt_positions, int slot_positions) {
  using Pack16 = uint4;
  constexpr int SIZE = sizeof(Pack16) / sizeof(T);  // values that a thread moves at once
  const int row = blockIdx.x / heads, head = blockIdx.x % heads;
  const int packs = plan[2 * num_rows + row] * (size / SIZE);
  const T* from = prompt0;
  const T* to = pool0;
  switch (blockIdx.z) {
    CASES
  }
  from += (int64_t(plan[row]) * heads + head) * prompt_positions * size;
  to += (int64_t(plan[num_rows + row]) * heads + head) * slot_positions * size;
  const Pack16* source = reinterpret_cast<const Pack16*>(from);
  Pack16* target = reinterpret_cast<Pack16*>(const_cast<T*>(to));
  for (int place = blockIdx.y * blockDim.x + threadIdx.x; place < packs; place += gridDim.y * blockDim.x)
    target[place] = source[place];
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) done[0] = 0;
}
