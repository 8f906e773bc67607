// The vector from value `start` of a head on. DIMS values of the head are rotated by `angles`, cosine and sine of each
// pair (0: none); pairs are neighbours if PAIRED, or else half of DIMS apart.
template <typename T>
__device__ __forceinline__ Pack<T> rotated_vector(const T* head, int start, const float2* angles) {
  constexpr int HALF = DIMS > 0 ? DIMS / 2 : 1;
  Pack<T> own = *reinterpret_cast<const Pack<T>*>(head + start);
  if (start >= DIMS) return own;
  const float2* angle = angles + (PAIRED ? start / 2 : start % HALF);
  if constexpr (PAIRED) {
#pragma unroll
    for (int i = 0; i < Pack<T>::size; i += 2) {
      const float first = float(own.values[i]), second = float(own.values[i + 1]);
      const float2 turn = angle[i / 2];
      own.values[i] = T(first * turn.x - second * turn.y);
      own.values[i + 1] = T(first * turn.y + second * turn.x);
    }
  } else {
    const bool is_first = start < HALF;
    const Pack<T> other = *reinterpret_cast<const Pack<T>*>(head + (is_first ? start + HALF : start - HALF));
#pragma unroll
    for (int i = 0; i < Pack<T>::size; i++) {
      const float2 turn = angle[i];
      const float sine = is_first ? -turn.y : turn.y;
      own.values[i] = T(float(own.values[i]) * turn.x + float(other.values[i]) * sine);
    }
  }
  return own;
}
