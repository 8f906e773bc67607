// The gradient of `gather_rows` among all rows: row n is the sum of what its readers got, `order` from starts[n] to
// starts[n + 1], in float32. T type. A block has one row.
#include "pack.cuh"

extern "C" __global__ void gather_rows_gradient(const T* cotangents, const int* order, const int* starts, T* gradient,
                                                int width) {
  using P = Pack<T>;
  const int packs = width / P::size, begin = starts[blockIdx.x], end = starts[blockIdx.x + 1];
  const P* source = reinterpret_cast<const P*>(cotangents);
  P* target = reinterpret_cast<P*>(gradient) + int64_t(blockIdx.x) * packs;
  for (int place = threadIdx.x; place < packs; place += blockDim.x) {
    float sums[P::size] = {};
    for (int reader = begin; reader < end; reader++) {
      P values = source[int64_t(order[reader]) * packs + place];
      for (int i = 0; i < P::size; i++) sums[i] += float(values.values[i]);
    }
    P result;
    for (int i = 0; i < P::size; i++) result.values[i] = T(sums[i]);
    target[place] = result;
  }
}
