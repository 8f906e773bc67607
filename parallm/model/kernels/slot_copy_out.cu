// Copies a slot's positions out of pools of one shape.
// T type; CASES choose a block's pool among `pool0`, `pool1` ...
  using Pack16 = uint4;
  constexpr int SIZE = sizeof(Pack16) / sizeof(T);  // values that a thread moves at once
  const int heads = pool0_shape[1], size = pool0_shape[3], head = blockIdx.x;
  const int length = place[2], packs = length * (size / SIZE);
  const T* from = pool0;
  switch (blockIdx.z) {
    CASES
  }
  from += ((int64_t(place[0]) * heads + head) * pool0_shape[2] + place[1]) * size;
  const Pack16* source = reinterpret_cast<const Pack16*>(from);
  Pack16* target = reinterpret_cast<Pack16*>(copied + (int64_t(blockIdx.z) * heads + head) * length * size);
  for (int index = blockIdx.y * blockDim.x + threadIdx.x; index < packs; index += gridDim.y * blockDim.x)
    target[index] = source[index];
