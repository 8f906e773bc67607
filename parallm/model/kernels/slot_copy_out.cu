// Copies a slot's positions out of pools of one shape.
// T type; POINTERS are the parameters `pool0`, `pool1` ..., among which CASES choose a block's pool.

extern "C" __global__ void slot_copy_out(POINTERS, const int* place, T* copied, int heads, int size,
                                         int slot_positions) {
  using Pack16 = uint4;
  constexpr int SIZE = sizeof(Pack16) / sizeof(T);  // values that a thread moves at once
  const int head = blockIdx.x;
  const int length = place[2], packs = length * (size / SIZE);
  const T* from = pool0;
  switch (blockIdx.z) {
    CASES
  }
  from += ((int64_t(place[0]) * heads + head) * slot_positions + place[1]) * size;
  const Pack16* source = reinterpret_cast<const Pack16*>(from);
  Pack16* target = reinterpret_cast<Pack16*>(copied + (int64_t(blockIdx.z) * heads + head) * length * size);
  for (int index = blockIdx.y * blockDim.x + threadIdx.x; index < packs; index += gridDim.y * blockDim.x)
    target[index] = source[index];
}
