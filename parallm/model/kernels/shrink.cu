// Products of the rows' input with A of their own versions.
// Inputs `x` (B, T, I), `order` (B, 2), `starts` and `factors` (V, N), where A (K, I) of a version begins at
// `starts[0]`. Output `hidden` (P, B, T, V K): sums over chunks of I, those of a row's own version.
// T type, K columns of all A of a group, COLUMNS that a warp multiplies by, TILE rows that a block serves, CHUNK of I.
// `order` holds rows and the versions that they use, if SORTED those of a version beside each other: the rows of a tile
// use one version, or few, and read its factors once. `factors` (V, N) may hold versions that no row uses.
// This kernel waits for memory more than it computes, so loads that do not depend on each other are issued together.
// That includes its own code, which the weights of other layers have driven out of the caches since the last time: a
// thousand instructions take 2 microseconds on an H200, so loops are unrolled only where registers need it.
// A lane takes a vector of the input and the same of each column; the sums of all lanes are then added by halves: after
// each exchange a lane has half as many sums, which stand for twice as many lanes.
#include "dependent.cuh"
#include "pack.cuh"

extern "C" __global__ void shrink(const T* x, const int* order, const int* starts, const T* factors, float* hidden,
                                  int num_rows, int tokens, int width, int versions, int numbers_of_version) {
  wait_for_inputs();
  using P = Pack<T>;
  const int rows = num_rows * tokens;
  const int first = blockIdx.x * TILE, begin = blockIdx.y * CHUNK, end = min(begin + CHUNK, width);
  const int lane = threadIdx.x % 32;
  auto row_at = [&](int place) {
    return int64_t(SORTED ? order[place / tokens * 2] * tokens + place % tokens : place);
  };
  constexpr int none_left = 1 << 30;
  int own[TILE];  // versions; -1 for rows without an adapter
#pragma unroll
  for (int t = 0; t < TILE; t++) own[t] = order[min(first + t, rows - 1) / tokens * 2 + 1];
  auto used_after = [&](int version) {
    int next = none_left;
#pragma unroll
    for (int t = 0; t < TILE; t++)
      if (own[t] > version) next = min(next, own[t]);
    return next;
  };
  const int64_t numbers = numbers_of_version, start = starts[0];
#pragma unroll 1
  for (int column = threadIdx.x / 32 * COLUMNS; column < K; column += blockDim.x / 32 * COLUMNS) {
    float sum[TILE * COLUMNS] = {};
#pragma unroll 1
    for (int version = used_after(-1); version < none_left; version = used_after(version)) {
      const T* a = factors + version * numbers + start + int64_t(column) * width;
#pragma unroll 1
      for (int i = begin + lane * P::size; i < end; i += 32 * P::size) {
        P factor[COLUMNS], given[TILE];
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) factor[k] = *reinterpret_cast<const P*>(a + int64_t(k) * width + i);
#pragma unroll
        for (int t = 0; t < TILE; t++)
          given[t] = *reinterpret_cast<const P*>(x + row_at(min(first + t, rows - 1)) * width + i);
#pragma unroll
        for (int t = 0; t < TILE; t++) {
          if (own[t] != version) continue;
#pragma unroll
          for (int j = 0; j < P::size; j++)
#pragma unroll
            for (int k = 0; k < COLUMNS; k++)
              sum[t * COLUMNS + k] += float(given[t].values[j]) * float(factor[k].values[j]);
        }
      }
    }
    int kept = 0;  // the first of the sums that this lane has left
#pragma unroll
    for (int halving = 0; halving < 5; halving++) {
      const int away = 16 >> halving, left = TILE * COLUMNS / 2 >> halving;
      const bool upper = lane & away;
      if (upper) kept += left;
#pragma unroll
      for (int s = 0; s < TILE * COLUMNS / 2; s++) {
        if (s >= left) continue;
        const float given = upper ? sum[s] : sum[left + s];
        sum[s] = (upper ? sum[left + s] : sum[s]) + __shfl_xor_sync(0xffffffff, given, away);
      }
    }
#pragma unroll
    for (int s = 0; s < TILE * COLUMNS / 32; s++) {
      const int place = first + (kept + s) / COLUMNS, version = order[min(place, rows - 1) / tokens * 2 + 1];
      if (place >= rows || version < 0) continue;
      const int64_t at = (int64_t(blockIdx.y) * rows + row_at(place)) * versions + version;
      hidden[at * K + column + (kept + s) % COLUMNS] = sum[s];
    }
  }
}
