"""Sources of the kernels in `slot_copy`. T type; a block copies a part of one head of one row of one array."""

THREADS = 256  # of a block
PACKS_OF_THREAD = 8  # of 16 bytes, at most

_IN = """
  using Pack16 = uint4;
  constexpr int SIZE = sizeof(Pack16) / sizeof(T);  // values that a thread moves at once
  const int heads = pool0_shape[1], size = pool0_shape[3], num_rows = plan_shape[1];
  const int row = blockIdx.x / heads, head = blockIdx.x % heads;
  const int packs = plan[2 * num_rows + row] * (size / SIZE);
  const T* from = prompt0;
  const T* to = pool0;
  switch (blockIdx.z) {
    CASES
  }
  from += (int64_t(plan[row]) * heads + head) * prompt0_shape[2] * size;
  to += (int64_t(plan[num_rows + row]) * heads + head) * pool0_shape[2] * size;
  const Pack16* source = reinterpret_cast<const Pack16*>(from);
  Pack16* target = reinterpret_cast<Pack16*>(const_cast<T*>(to));
  for (int place = blockIdx.y * blockDim.x + threadIdx.x; place < packs; place += gridDim.y * blockDim.x)
    target[place] = source[place];
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) done[0] = 0;
"""
_OUT = """
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
"""


def source_in(num_arrays: int) -> str:
    """For so many arrays of one shape: `prompt0`, `prompt1` ... beside `pool0`, `pool1` ..."""
    cases = [f"case {place}: from = prompt{place}; to = pool{place}; break;" for place in range(1, num_arrays)]
    return _IN.replace("CASES", "\n    ".join(cases))


def source_out(num_arrays: int) -> str:
    """For so many pools of one shape: `pool0`, `pool1` ..."""
    cases = [f"case {place}: from = pool{place}; break;" for place in range(1, num_arrays)]
    return _OUT.replace("CASES", "\n    ".join(cases))
