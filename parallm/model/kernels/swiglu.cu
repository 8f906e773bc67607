// silu(gate) x, a vector a thread. T type. HALVES: gate and x are the halves of each row of `joined`.
#include "dependent.cuh"
#include "pack.cuh"

extern "C" __global__ void swiglu(
#if HALVES
    const T* joined, T* product, int rows, int joined_width
#else
    const T* gate, const T* x, T* product, int size
#endif
) {
  wait_for_inputs();
  using P = Pack<T>;
#if HALVES
  const int64_t width = joined_width / 2 / P::size;  // vectors of a row's half
#endif
  int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
#if HALVES
  if (index >= rows * width) return;
  const P* row = reinterpret_cast<const P*>(joined) + index / width * 2 * width;
  P g = row[index % width], u = row[width + index % width], y;
#else
  if (index * P::size >= size) return;
  P g = reinterpret_cast<const P*>(gate)[index], u = reinterpret_cast<const P*>(x)[index], y;
#endif
  for (int i = 0; i < P::size; i++) {
    float wide = float(g.values[i]);
    y.values[i] = T(wide / (1.0f + __expf(-wide)) * float(u.values[i]));
  }
  reinterpret_cast<P*>(product)[index] = y;
}
