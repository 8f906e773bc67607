"""Sources of the kernels in `row_lora`.

T type of all arrays but the sums, K columns of all A of a group, TILE rows that a block serves, SORTED: constants.
`order` holds rows and the versions that they use, if SORTED those of a version beside each other: the rows of a tile
use one version, or few, and read its factors once. `factors` (V, N) may hold versions that no row uses.

These kernels wait for memory more than they compute, so loads that do not depend on each other are issued together.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

COLUMNS = 8  # of A that a warp of `shrink` multiplies by
MOST_WARPS = 8  # of a block of `shrink`
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
      const int row = first + (kept + s) / COLUMNS;
      if (row < rows) parts[(int64_t(blockIdx.y) * rows + row) * K + column + (kept + s) % COLUMNS] = sum[s];
    }
  }
"""
_EXPAND = """
  using P = Pack<T>;
  const int tokens = y_shape[1], rows = y_shape[0] * tokens, first = blockIdx.y * TILE;
  ROW_AT
  const int widths[] = {WIDTHS};
  PLACED
  const bool is_inside = site < SITES && vector * P::size < widths[min(site, SITES - 1)];
  const int width = widths[min(site, SITES - 1)];

  P given[TILE];
#pragma unroll
  for (int t = 0; t < TILE; t++)
    if (is_inside)
      given[t] = *reinterpret_cast<const P*>(y + row_at(min(first + t, rows - 1)) * TOTAL + start + vector * P::size);
  FETCHED
  float sum[TILE][P::size];
#pragma unroll
  for (int t = 0; t < TILE; t++)
#pragma unroll
    for (int j = 0; j < P::size; j++) sum[t][j] = float(given[t].values[j]);
  ADDED
  STORED
"""
_IN_TURN = """
  int vector = blockIdx.x * THREADS + threadIdx.x, site = 0, start = 0;
  while (site < SITES && vector * P::size >= widths[site]) {
    vector -= widths[site] / P::size;
    start += widths[site++];
  }
"""
_SIDE_BY_SIDE = """
  const int site = threadIdx.x / 32, vector = blockIdx.x * 32 + threadIdx.x % 32, start = site * widths[0];
"""
_APART = """
  if (!is_inside) return;
  T* const outputs[] = {OUTPUTS};
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    if (first + t >= rows) break;
    P values;
#pragma unroll
    for (int j = 0; j < P::size; j++) values.values[j] = T(sum[t][j]);
    *reinterpret_cast<P*>(outputs[site] + row_at(first + t) * width + vector * P::size) = values;
  }
"""
_GATED = """
  __shared__ float gates[TILE][P::size][32];
#pragma unroll
  for (int t = 0; t < TILE; t++)
#pragma unroll
    for (int j = 0; j < P::size; j++)
      if (site == 0) gates[t][j][threadIdx.x] = float(T(sum[t][j]));
  __syncthreads();
  if (site == 0 || !is_inside) return;
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    if (first + t >= rows) break;
    P values;
#pragma unroll
    for (int j = 0; j < P::size; j++) {
      const float gate = gates[t][j][threadIdx.x - 32];
      values.values[j] = T(gate / (1.0f + __expf(-gate)) * float(T(sum[t][j])));
    }
    *reinterpret_cast<P*>(product + row_at(first + t) * width + vector * P::size) = values;
  }
"""
_FETCHED = """
  constexpr int AT_ONCE = 64 / TILE;  // rows of B: as many as registers take beside the sums
  OWN
  const int ranks[] = {RANKS}, columns[] = {COLUMNS_OF};
  const int rank = ranks[min(site, SITES - 1)], column = columns[min(site, SITES - 1)];
  const int64_t numbers = factors_shape[1], begin = starts[1 + min(site, SITES - 1)] + vector * P::size;
  const int lowest = used_after(-1);
  P factor[AT_ONCE];
  auto fetch = [&](int version, int r) {
    const T* b = factors + version * numbers + begin + int64_t(r) * width;
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++)
      if (r + u < rank && is_inside) factor[u] = *reinterpret_cast<const P*>(b + int64_t(u) * width);
  };
  if (lowest < none_left) fetch(lowest, 0);

  __shared__ float4 hidden[TILE][K / 4];
  const float4* parts_of = reinterpret_cast<const float4*>(parts);
  for (int i = threadIdx.x; i < TILE * K / 4; i += THREADS) {
    int64_t row = min(first + i / (K / 4), rows - 1);
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int p = 0; p < parts_shape[0]; p++) {
      float4 part = parts_of[(p * int64_t(rows) + row) * (K / 4) + i % (K / 4)];
      total.x += part.x;
      total.y += part.y;
      total.z += part.z;
      total.w += part.w;
    }
    hidden[i / (K / 4)][i % (K / 4)] = total;
  }
  __syncthreads();
"""
_ADDED = """
#pragma unroll 1
  for (int version = lowest; version < none_left; version = used_after(version))
#pragma unroll 1
    for (int r = 0; r < rank; r += AT_ONCE) {
      if (version > lowest || r > 0) fetch(version, r);
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++)
#pragma unroll
        for (int t = 0; t < TILE; t++) {
          if (own[t] != version || r + u >= rank) continue;
          float value = reinterpret_cast<const float*>(hidden[t])[column + r + u];
#pragma unroll
          for (int j = 0; j < P::size; j++) sum[t][j] += value * float(factor[u].values[j]);
        }
    }
"""


@cache
def shrink_source() -> str:
    """Inputs `x` (B, T, I), `order` (B, 2), `starts` and `factors` (V, N), where A (K, I) of a version begins at
    `starts[0]`; output `parts`: sums over chunks of I, in the order of `order`."""
    return _filled(_SHRINK, OWN=_OWN, ROW_AT=_ROW_AT, COLUMNS=COLUMNS)


@cache
def expand_source(widths: tuple[int, ...], ranks: tuple[int, ...], *, gated: bool = False) -> str:
    """Inputs `y` (B, T, sum of widths) and, where there are `ranks`, `parts` and what `shrink` gets, where B (R, O) of
    site s begins at `starts[1 + s]`; outputs `out0`, `out1`, ... of each site, or if `gated` the `product` of two:
    silu of the first by the second, both rounded before."""
    added = {"FETCHED": _FETCHED, "ADDED": _ADDED} if ranks else {"FETCHED": "", "ADDED": ""}
    ways = {"PLACED": _SIDE_BY_SIDE, "STORED": _GATED} if gated else {"PLACED": _IN_TURN, "STORED": _APART}
    return _filled(
        _EXPAND,
        **added,
        **ways,
        OWN=_OWN,
        ROW_AT=_ROW_AT if ranks else _UNORDERED,
        WIDTHS=_listed(widths),
        RANKS=_listed(ranks),
        COLUMNS_OF=_listed([0, *accumulate(ranks)][: len(ranks)]),
        OUTPUTS=_listed([f"out{site}" for site in range(len(widths))]),
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
