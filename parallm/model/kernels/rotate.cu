// Heads (M, X, D) rotated by the angles of their tokens.
// T type; the first DIMS values of a head are rotated, PAIRED with their neighbours or with those DIMS / 2 apart.
// BACK is the transpose.
#include "pack.cuh"

extern "C" __global__ void rotate(const T* heads, const float* angles, T* turned, int num_tokens, int num_heads) {
  using P = Pack<T>;
  // A thread moves a vector of a head's first values and the one that it pairs with; BACK is the transpose
  constexpr int VECTORS = D / P::size, TURNED = DIMS / P::size, UNITS = VECTORS - (PAIRED ? 0 : TURNED / 2);
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const float sign = BACK ? -1.0f : 1.0f;
  if (index >= num_tokens * num_heads * int64_t(UNITS)) return;
  const int64_t head = index / UNITS, token = head / num_heads;
  const int unit = index % UNITS;
  const P* from = reinterpret_cast<const P*>(heads) + head * VECTORS;
  P* to = reinterpret_cast<P*>(turned) + head * VECTORS;
  const float2* turns = reinterpret_cast<const float2*>(angles) + token * (DIMS / 2);
  if constexpr (PAIRED) {
    P values = from[unit];
    if (unit < TURNED)
      for (int i = 0; i < P::size; i += 2) {
        float2 turn = turns[unit * P::size / 2 + i / 2];
        float first = float(values.values[i]), second = float(values.values[i + 1]);
        values.values[i] = T(first * turn.x - sign * second * turn.y);
        values.values[i + 1] = T(sign * first * turn.y + second * turn.x);
      }
    to[unit] = values;
  } else if (unit < TURNED / 2) {
    P low = from[unit], high = from[unit + TURNED / 2];
    for (int i = 0; i < P::size; i++) {
      float2 turn = turns[unit * P::size + i];
      float first = float(low.values[i]), second = float(high.values[i]);
      low.values[i] = T(first * turn.x - sign * second * turn.y);
      high.values[i] = T(sign * first * turn.y + second * turn.x);
    }
    to[unit] = low;
    to[unit + TURNED / 2] = high;
  } else {
    to[unit + TURNED / 2] = from[unit + TURNED / 2];
  }
}
