// Writes new keys and values into pages, keys rotated, and returns the rotated queries of the same tokens.
// T type, D head size, H key-value heads, G queries of each, PAGE positions. Slot s of `slots` is position s % PAGE of
// page s / PAGE. DIMS values of each head are rotated by a token's `angles` (0: none), neighbours with each other if
// PAIRED. Queries, keys and values may be columns of one product: the first token's begin at `*_start`, the next one's
// `*_pitch` values after.
#include "pack.cuh"

extern "C" __global__ void page_write(const T* queries, const T* new_keys, const T* new_values, const T* keys,
                                      const T* values, const int* slots, const float* angles, T* turned, int num_tokens,
                                      int queries_start, int queries_pitch, int keys_start, int keys_pitch,
                                      int values_start, int values_pitch) {
  using P = Pack<T>;
  // A thread moves a vector of a head's first values and the one that it pairs with
  constexpr int VECTORS = D / P::size, TURNED = DIMS / P::size, UNITS = VECTORS - (PAIRED ? 0 : TURNED / 2);
  constexpr int QUERIES = H * G * UNITS, KEYS = H * UNITS, ALL = QUERIES + KEYS + H * VECTORS;  // of a token
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, token = index / ALL;
  if (token >= num_tokens) return;
  auto values_at = [](const T* from) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(P) == 0) return *reinterpret_cast<const P*>(from);
    P found;
    for (int j = 0; j < P::size; j++) found.values[j] = from[j];
    return found;
  };
  int unit = index % ALL;
  const int slot = slots[token];
  auto in_pages = [&](const T* pages, int head) {
    return const_cast<T*>(pages) + ((int64_t(slot / PAGE) * H + head) * PAGE + slot % PAGE) * D;
  };
  if (unit >= QUERIES + KEYS) {
    unit -= QUERIES + KEYS;
    const int head = unit / VECTORS, at = unit % VECTORS * P::size;
    *reinterpret_cast<P*>(in_pages(values, head) + at) =
        values_at(new_values + values_start + token * values_pitch + head * D + at);
    return;
  }
  const bool is_key = unit >= QUERIES;
  if (is_key) unit -= QUERIES;
  const int head = unit / UNITS;
  unit %= UNITS;
  const T* from = (is_key ? new_keys + keys_start + token * keys_pitch : queries + queries_start + token * queries_pitch) +
                  head * D;
  T* to = is_key ? in_pages(keys, head) : turned + (token * H * G + head) * D;
  auto put = [&](int vector, const P& found) { *reinterpret_cast<P*>(to + vector * P::size) = found; };
  const float2* turns = reinterpret_cast<const float2*>(angles) + token * (DIMS / 2);
  if constexpr (PAIRED) {
    P found = values_at(from + unit * P::size);
    if (unit < TURNED)
#pragma unroll
      for (int i = 0; i < P::size; i += 2) {
        float2 turn = turns[unit * P::size / 2 + i / 2];
        float first = float(found.values[i]), second = float(found.values[i + 1]);
        found.values[i] = T(first * turn.x - second * turn.y);
        found.values[i + 1] = T(first * turn.y + second * turn.x);
      }
    put(unit, found);
  } else if (unit < TURNED / 2) {
    P low = values_at(from + unit * P::size), high = values_at(from + (unit + TURNED / 2) * P::size);
#pragma unroll
    for (int i = 0; i < P::size; i++) {
      float2 turn = turns[unit * P::size + i];
      float first = float(low.values[i]), second = float(high.values[i]);
      low.values[i] = T(first * turn.x - second * turn.y);
      high.values[i] = T(first * turn.y + second * turn.x);
    }
    put(unit, low);
    put(unit + TURNED / 2, high);
  } else {
    put(unit + TURNED / 2, values_at(from + (unit + TURNED / 2) * P::size));
  }
}
