// The base's output, cut into that of each target, with the rows' LoRA added.
// Inputs `y` (S, B, T, sum of widths) of type Y, parts to be added up; if it ADDS something, `other` (B, T, width) for
// the only target; if HAS_LORA, `hidden` and the inputs of shrink.cu, where B (R, O) of target s begins at
// `starts[1 + s]`. Outputs `out0`, `out1`, ... of each target, or if GATED the `product` of two: silu of the first by
// the second, both rounded before.
// T type of all arrays but the sums, SPLITS parts of y, WIDTHS and RANKS of the TARGETS targets, TOTAL of the widths,
// K columns of all A, TILE rows that a block serves, THREADS of a block.
// `order` holds rows and the versions that they use, if SORTED those of a version beside each other: the rows of a tile
// use one version, or few, and read its factors once. `factors` (V, N) may hold versions that no row uses.
// This kernel waits for memory more than it computes, so loads that do not depend on each other are issued together.
// That includes its own code, which the weights of other layers have driven out of the caches since the last time: a
// thousand instructions take 2 microseconds on an H200, so loops are unrolled only where registers need it.
#include "dependent.cuh"
#include "pack.cuh"

extern "C" __global__ void expand(const Y* y,
#if ADDS
                                  const T* other,
#endif
#if HAS_LORA
                                  const float* hidden, const int* order, const int* starts, const T* factors,
#endif
                                  POINTERS,
#if HAS_LORA
                                  int num_parts, int versions, int numbers_of_version,
#endif
                                  int num_rows, int tokens) {
  wait_for_inputs();
  using P = Pack<T>;
  const int rows = num_rows * tokens, first = blockIdx.y * TILE;
#if HAS_LORA
  auto row_at = [&](int place) {
    return int64_t(SORTED ? order[place / tokens * 2] * tokens + place % tokens : place);
  };
#else
  auto row_at = [&](int place) { return int64_t(place); };
#endif
  constexpr int widths[] = {WIDTHS};
#if GATED
  const int target = threadIdx.x / 32, vector = blockIdx.x * 32 + threadIdx.x % 32, width = widths[0];
  const int start = target * width;
#else
  int vector = blockIdx.x * THREADS + threadIdx.x, target = 0, start = 0, width = widths[0];
#pragma unroll
  for (int s = 1; s < TARGETS; s++)
    if (target == s - 1 && vector * P::size >= widths[s - 1]) {
      vector -= widths[s - 1] / P::size;
      start += widths[s - 1];
      width = widths[s];
      target = s;
    }
#endif
  const bool is_inside = vector * P::size < width;
  struct alignas(16) Given {
    Y values[P::size];
  } given[TILE][SPLITS];
#pragma unroll
  for (int t = 0; t < TILE; t++)
#pragma unroll
    for (int s = 0; s < SPLITS; s++)
      if (is_inside)
        given[t][s] = *reinterpret_cast<const Given*>(
            y + (int64_t(s) * rows + row_at(min(first + t, rows - 1))) * TOTAL + start + vector * P::size);
#if ADDS
  P others[TILE];
#pragma unroll
  for (int t = 0; t < TILE; t++)
    if (is_inside)
      others[t] = *reinterpret_cast<const P*>(other + row_at(min(first + t, rows - 1)) * TOTAL + vector * P::size);
#endif
  float sum[TILE][P::size] = {};
#if HAS_LORA
  constexpr int AT_ONCE = 16;  // rows of B
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
  constexpr int ranks[] = {RANKS};
  int rank = ranks[0], column = 0;
#pragma unroll
  for (int s = 1; s < TARGETS; s++)
    if (target >= s) {
      column += ranks[s - 1];
      rank = ranks[s];
    }
  const int64_t numbers = numbers_of_version, begin = starts[1 + target] + vector * P::size;
  __shared__ P factor[AT_ONCE][THREADS];
  __shared__ float totals[TILE][K];
  bool has_totals = false;
  auto after = [&](int version) { return SORTED ? used_after(version) : version < 0 ? 0 : none_left; };
#pragma unroll 1
  for (int version = after(-1); version < none_left; version = after(version))
#pragma unroll 1
    for (int r = 0; r < rank; r += AT_ONCE) {
      const int count = min(AT_ONCE, rank - r);
      const T* b = factors + version * numbers + begin + int64_t(r) * width;
      const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(&factor[0][threadIdx.x]));
      if (is_inside)
#pragma unroll 4
        for (int u = 0; u < count; u++)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + u * int(sizeof(factor[0]))),
                       "l"(b + int64_t(u) * width)
                       : "memory");
      if (!has_totals) {
#pragma unroll 1
        for (int i = threadIdx.x; i < TILE * K; i += THREADS) {
          const int place = min(first + i / K, rows - 1), of_row = order[place / tokens * 2 + 1];
          const float* parts = hidden + (row_at(place) * versions + max(of_row, 0)) * K + i % K;
          float total = 0.0f;
#pragma unroll 4
          for (int p = 0; p < num_parts; p++) total += parts[p * int64_t(rows) * versions * K];
          totals[i / K][i % K] = total;
        }
        __syncthreads();
        has_totals = true;
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
      if (is_inside)
#pragma unroll 2
        for (int u = 0; u < count; u++) {
          const P of_rank = factor[u][threadIdx.x];
#pragma unroll
          for (int t = 0; t < TILE; t++) {
            const float value = own[t] == version ? totals[t][column + r + u] : 0.0f;
#pragma unroll
            for (int j = 0; j < P::size; j++) sum[t][j] += value * float(of_rank.values[j]);
          }
        }
    }
#endif
#pragma unroll
  for (int t = 0; t < TILE; t++)
#pragma unroll
    for (int j = 0; j < P::size; j++) {
#pragma unroll
      for (int s = 0; s < SPLITS; s++) sum[t][j] += float(given[t][s].values[j]);
#if ADDS
      sum[t][j] += float(others[t].values[j]);
#endif
    }
#if GATED
  __shared__ P halves[2][TILE][32];
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    P values;
#pragma unroll
    for (int j = 0; j < P::size; j++) values.values[j] = T(sum[t][j]);
    halves[target][t][threadIdx.x % 32] = values;
  }
  __syncthreads();
  if (!is_inside) return;
#pragma unroll 1
  for (int t = target; t < TILE; t += 2) {
    if (first + t >= rows) break;
    P gate = halves[0][t][threadIdx.x % 32], up = halves[1][t][threadIdx.x % 32], values;
#pragma unroll
    for (int j = 0; j < P::size; j++) {
      const float wide = float(gate.values[j]);
      values.values[j] = T(__fdividef(wide, 1.0f + __expf(-wide)) * float(up.values[j]));
    }
    *reinterpret_cast<P*>(product + row_at(first + t) * width + vector * P::size) = values;
  }
#else
  if (!is_inside) return;
  T* const outputs[] = {OUTPUTS};
  T* output = outputs[0];
#pragma unroll
  for (int s = 1; s < TARGETS; s++)
    if (target == s) output = outputs[s];
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    if (first + t >= rows) break;
    P values;
#pragma unroll
    for (int j = 0; j < P::size; j++) values.values[j] = T(sum[t][j]);
    *reinterpret_cast<P*>(output + row_at(first + t) * width + vector * P::size) = values;
  }
#endif
}
