// The gradients of swiglu.cu, of the same T and HALVES.
#include "pack.cuh"

extern "C" __global__ void swiglu_gradient(
#if HALVES
    const T* joined, const T* cotangent, T* gradient, int rows, int joined_width
#else
    const T* gate, const T* x, const T* cotangent, T* gate_gradient, T* x_gradient, int size
#endif
) {
  using P = Pack<T>;
#if HALVES
  const int64_t width = joined_width / 2 / P::size;
#endif
  int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
#if HALVES
  if (index >= rows * width) return;
  const int64_t first = index / width * 2 * width + index % width;
  P g = reinterpret_cast<const P*>(joined)[first], u = reinterpret_cast<const P*>(joined)[first + width];
#else
  if (index * P::size >= size) return;
  P g = reinterpret_cast<const P*>(gate)[index], u = reinterpret_cast<const P*>(x)[index];
#endif
  P c = reinterpret_cast<const P*>(cotangent)[index], dg, du;
  for (int i = 0; i < P::size; i++) {
    float wide = float(g.values[i]), given = float(c.values[i]);
    float sigmoid = 1.0f / (1.0f + __expf(-wide));
    du.values[i] = T(given * wide * sigmoid);
    dg.values[i] = T(given * float(u.values[i]) * sigmoid * (1.0f + wide * (1.0f - sigmoid)));
  }
#if HALVES
  reinterpret_cast<P*>(gradient)[first] = dg;
  reinterpret_cast<P*>(gradient)[first + width] = du;
#else
  reinterpret_cast<P*>(gate_gradient)[index] = dg;
  reinterpret_cast<P*>(x_gradient)[index] = du;
#endif
}
