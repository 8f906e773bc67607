"""Sources of the kernels in `row_lora`.

T type of all arrays but the sums, Y of the SPLITS parts of the base's product, K columns of all A of a group, TILE rows
that a block serves, SORTED: constants.
`order` holds rows and the versions that they use, if SORTED those of a version beside each other: the rows of a tile
use one version, or few, and read its factors once. `factors` (V, N) may hold versions that no row uses.

These kernels wait for memory more than they compute, so loads that do not depend on each other are issued together.
That includes their own code, which the weights of other layers have driven out of the caches since the last time: a
thousand instructions take 2 microseconds (one H200, 2026-11-22), so loops are unrolled only where registers need it.
"""

from collections.abc import Sequence
from functools import cache

COLUMNS = 8  # of A that a warp of `shrink` multiplies by
MAX_WARPS = 8  # of a block of `shrink`
EXPAND_THREADS = 64  # of a block

_OWN = """
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
"""
_ROW_AT = """
  auto row_at = [&](int place) {
    return int64_t(SORTED ? order[place / tokens * 2] * tokens + place % tokens : place);
  };
"""
_UNORDERED = """
  auto row_at = [&](int place) { return int64_t(place); };
"""
# A lane takes a vector of the input and the same of each column; the sums of all lanes are then added by halves: after
# each exchange a lane has half as many sums, which stand for twice as many lanes.
_SHRINK = """
  using P = Pack<T>;
  const int tokens = x_shape[1], rows = x_shape[0] * tokens, width = x_shape[2];
  const int first = blockIdx.x * TILE, begin = blockIdx.y * CHUNK, end = min(begin + CHUNK, width);
  const int lane = threadIdx.x % 32;
  ROW_AT
  OWN
  const int64_t numbers = factors_shape[1], start = starts[0];
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
      const int64_t at = (int64_t(blockIdx.y) * rows + row_at(place)) * factors_shape[0] + version;
      hidden[at * K + column + (kept + s) % COLUMNS] = sum[s];
    }
  }
"""
_EXPAND = """
  using P = Pack<T>;
  const int tokens = y_shape[2], rows = y_shape[1] * tokens, first = blockIdx.y * TILE;
  ROW_AT
  constexpr int widths[] = {WIDTHS};
  PLACED
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
  OTHERS
  float sum[TILE][P::size] = {};
  LORA
#pragma unroll
  for (int t = 0; t < TILE; t++)
#pragma unroll
    for (int j = 0; j < P::size; j++) {
#pragma unroll
      for (int s = 0; s < SPLITS; s++) sum[t][j] += float(given[t][s].values[j]);
      ADDED
    }
  STORED
"""
_IN_TURN = """
  int vector = blockIdx.x * THREADS + threadIdx.x, site = 0, start = 0, width = widths[0];
#pragma unroll
  for (int s = 1; s < SITES; s++)
    if (site == s - 1 && vector * P::size >= widths[s - 1]) {
      vector -= widths[s - 1] / P::size;
      start += widths[s - 1];
      width = widths[s];
      site = s;
    }
"""
_SIDE_BY_SIDE = """
  const int site = threadIdx.x / 32, vector = blockIdx.x * 32 + threadIdx.x % 32, width = widths[0];
  const int start = site * width;
"""
_OTHERS = """
  P others[TILE];
#pragma unroll
  for (int t = 0; t < TILE; t++)
    if (is_inside)
      others[t] = *reinterpret_cast<const P*>(other + row_at(min(first + t, rows - 1)) * TOTAL + vector * P::size);
"""
_APART = """
  if (!is_inside) return;
  T* const outputs[] = {OUTPUTS};
  T* output = outputs[0];
#pragma unroll
  for (int s = 1; s < SITES; s++)
    if (site == s) output = outputs[s];
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    if (first + t >= rows) break;
    P values;
#pragma unroll
    for (int j = 0; j < P::size; j++) values.values[j] = T(sum[t][j]);
    *reinterpret_cast<P*>(output + row_at(first + t) * width + vector * P::size) = values;
  }
"""
_GATED = """
  __shared__ P halves[2][TILE][32];
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    P values;
#pragma unroll
    for (int j = 0; j < P::size; j++) values.values[j] = T(sum[t][j]);
    halves[site][t][threadIdx.x % 32] = values;
  }
  __syncthreads();
  if (!is_inside) return;
#pragma unroll 1
  for (int t = site; t < TILE; t += 2) {
    if (first + t >= rows) break;
    P gate = halves[0][t][threadIdx.x % 32], up = halves[1][t][threadIdx.x % 32], values;
#pragma unroll
    for (int j = 0; j < P::size; j++) {
      const float wide = float(gate.values[j]);
      values.values[j] = T(__fdividef(wide, 1.0f + __expf(-wide)) * float(up.values[j]));
    }
    *reinterpret_cast<P*>(product + row_at(first + t) * width + vector * P::size) = values;
  }
"""
_LORA = """
  constexpr int AT_ONCE = 16;  // rows of B
  OWN
  constexpr int ranks[] = {RANKS};
  int rank = ranks[0], column = 0;
#pragma unroll
  for (int s = 1; s < SITES; s++)
    if (site >= s) {
      column += ranks[s - 1];
      rank = ranks[s];
    }
  const int64_t numbers = factors_shape[1], begin = starts[1 + site] + vector * P::size;
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
          const float* parts = hidden + (row_at(place) * factors_shape[0] + max(of_row, 0)) * K + i % K;
          float total = 0.0f;
#pragma unroll 4
          for (int p = 0; p < hidden_shape[0]; p++) total += parts[p * int64_t(rows) * factors_shape[0] * K];
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
"""


@cache
def shrink_source() -> str:
    """Inputs `x` (B, T, I), `order` (B, 2), `starts` and `factors` (V, N), where A (K, I) of a version begins at
    `starts[0]`; output `hidden` (P, B, T, V K): sums over chunks of I, those of a row's own version."""
    return _filled(_SHRINK, OWN=_OWN, ROW_AT=_ROW_AT, COLUMNS=COLUMNS)


@cache
def expand_source(widths: tuple[int, ...], ranks: tuple[int, ...], *, gated: bool = False, adds: bool = False) -> str:
    """Inputs `y` (S, B, T, sum of widths) of type Y, parts to be added up, if it `adds` something `other` (B, T, width)
    for the only site, and, where there are `ranks`, `hidden` and what `shrink` gets, where B (R, O) of site s begins at
    `starts[1 + s]`; outputs `out0`, `out1`, ... of each site, or if `gated` the `product` of two: silu of the first by
    the second, both rounded before."""
    ways = {"PLACED": _SIDE_BY_SIDE, "STORED": _GATED} if gated else {"PLACED": _IN_TURN, "STORED": _APART}
    return _filled(
        _EXPAND,
        LORA=_LORA if ranks else "",
        OTHERS=_OTHERS if adds else "",
        ADDED="sum[t][j] += float(others[t].values[j]);" if adds else "",
        **ways,
        OWN=_OWN,
        ROW_AT=_ROW_AT if ranks else _UNORDERED,
        WIDTHS=_listed(widths),
        RANKS=_listed(ranks),
        OUTPUTS=_listed([f"out{target}" for target in range(len(widths))]),
        SITES=len(widths),
        TOTAL=sum(widths),
        THREADS=EXPAND_THREADS,
    )


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _filled(source: str, **names: object) -> str:
    for name, value in names.items():
        source = source.replace(name, str(value))
    return source
