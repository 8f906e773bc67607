"""Sources of the kernels in `row_lora`.

T type of all arrays but the sums, K columns of all A of a group, VERSIONS adapters, TILE rows that a block serves:
constants. `order` holds rows and the versions that they use, those of a version beside each other: the rows of a tile
use one version, or few, and read its factors once.
"""

from collections.abc import Sequence
from itertools import accumulate

SHRINK_THREADS = 128  # of a block
EXPAND_THREADS = 64

_OWN = """
  const T* factors[] = {FACTORS};
  int own[TILE], lowest = VERSIONS, highest = -1;  // versions; -1 for rows without an adapter
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    own[t] = order[min(first + t, rows - 1) / tokens * 2 + 1];
    if (own[t] >= 0) lowest = min(lowest, own[t]);
    highest = max(highest, own[t]);
  }
"""
_ROW_AT = """
  auto row_at = [&](int place) { return int64_t(PLACE); };
"""
_SHRINK = """
  using P = Pack<T>;
  constexpr int COLUMNS = K / P::size, LANES = THREADS / COLUMNS;
  __shared__ float given[TILE][CHUNK], found[LANES][TILE][K];
  const int tokens = x_shape[1], rows = x_shape[0] * tokens, width = x_shape[2];
  const int first = blockIdx.x * TILE, begin = blockIdx.y * CHUNK, count = min(CHUNK, width - begin);
  ROW_AT
  for (int i = threadIdx.x; i < TILE * CHUNK / P::size; i += THREADS) {
    int t = i / (CHUNK / P::size), c = i % (CHUNK / P::size) * P::size;
    if (first + t >= rows || c >= count) continue;
    P values = *reinterpret_cast<const P*>(x + row_at(first + t) * width + begin + c);
#pragma unroll
    for (int j = 0; j < P::size; j++) given[t][c + j] = float(values.values[j]);
  }
  OWN
  __syncthreads();

  const int column = threadIdx.x % COLUMNS * P::size, lane = threadIdx.x / COLUMNS;
  float sum[TILE][P::size] = {};
  if (lane < LANES) {
#pragma unroll 1
    for (int version = lowest; version <= highest; version++) {
#pragma unroll 4
      for (int c = lane; c < count; c += LANES) {
        P factor = *reinterpret_cast<const P*>(factors[version] + starts[0] + int64_t(begin + c) * K + column);
#pragma unroll
        for (int t = 0; t < TILE; t++) {
          if (own[t] != version) continue;
#pragma unroll
          for (int j = 0; j < P::size; j++) sum[t][j] += given[t][c] * float(factor.values[j]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TILE; t++)
#pragma unroll
      for (int j = 0; j < P::size; j++) found[lane][t][column + j] = sum[t][j];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TILE * K; i += THREADS) {
    int t = i / K, k = i % K;
    if (first + t >= rows) continue;
    float total = 0.0f;
#pragma unroll 8
    for (int l = 0; l < LANES; l++) total += found[l][t][k];
    parts[(int64_t(blockIdx.y) * rows + first + t) * K + k] = total;
  }
"""
_EXPAND = """
  using P = Pack<T>;
  const int tokens = y_shape[1], rows = y_shape[0] * tokens, first = blockIdx.y * TILE;
  ROW_AT
  HIDDEN
  int vector = blockIdx.x * THREADS + threadIdx.x, site = 0, start = 0;
  const int widths[] = {WIDTHS};
  while (site < SITES && vector * P::size >= widths[site]) {
    vector -= widths[site] / P::size;
    start += widths[site++];
  }
  if (site == SITES) return;
  const int width = widths[site];
  T* const outputs[] = {OUTPUTS};

  float sum[TILE][P::size];
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    P values = *reinterpret_cast<const P*>(y + row_at(min(first + t, rows - 1)) * TOTAL + start + vector * P::size);
#pragma unroll
    for (int j = 0; j < P::size; j++) sum[t][j] = float(values.values[j]);
  }
  ADDED
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    if (first + t >= rows) break;
    P values;
#pragma unroll
    for (int j = 0; j < P::size; j++) values.values[j] = T(sum[t][j]);
    *reinterpret_cast<P*>(outputs[site] + row_at(first + t) * width + vector * P::size) = values;
  }
"""
_HIDDEN = """
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
  const int ranks[] = {RANKS}, columns[] = {COLUMNS};
  const int rank = ranks[site], column = columns[site];
  OWN
#pragma unroll 1
  for (int version = lowest; version <= highest; version++) {
    const T* b = factors[version] + starts[1 + site] + vector * P::size;
    for (int r = 0; r < rank; r += 8) {  // ranks are multiples of 8; loads first, that they are under way together
      P factor[8];
#pragma unroll
      for (int u = 0; u < 8; u++) factor[u] = *reinterpret_cast<const P*>(b + int64_t(r + u) * width);
#pragma unroll
      for (int u = 0; u < 8; u++)
#pragma unroll
        for (int t = 0; t < TILE; t++) {
          if (own[t] != version) continue;
          float value = reinterpret_cast<const float*>(hidden[t])[column + r + u];
#pragma unroll
          for (int j = 0; j < P::size; j++) sum[t][j] += value * float(factor[u].values[j]);
        }
    }
  }
"""


def shrink_source(num_versions: int) -> str:
    """Inputs `x` (B, T, I), `order` (B, 2), `starts` and `version0`, `version1`, ... (N,), which hold A (I, K) from
    `starts[0]` on; output `parts`: sums over chunks of I, in the order of `order`."""
    names = {"OWN": _OWN, "ROW_AT": _row_at(num_versions), "VERSIONS": num_versions}
    return _filled(_SHRINK, **names, FACTORS=_versions(num_versions), THREADS=SHRINK_THREADS)


def expand_source(widths: Sequence[int], ranks: Sequence[int], num_versions: int) -> str:
    """Inputs `y` (B, T, sum of widths) and, where there are versions, `parts` and what `shrink` gets, where B (R, O) of
    site s begins at `starts[1 + s]`; outputs `out0`, `out1`, ... of each site."""
    source = _filled(_EXPAND, HIDDEN=_HIDDEN, ADDED=_ADDED) if num_versions else _filled(_EXPAND, HIDDEN="", ADDED="")
    return _filled(
        source,
        OWN=_OWN,
        ROW_AT=_row_at(num_versions),
        VERSIONS=num_versions,
        FACTORS=_versions(num_versions),
        WIDTHS=_listed(widths),
        RANKS=_listed(ranks),
        COLUMNS=_listed([0, *accumulate(ranks)][: len(ranks)]),
        OUTPUTS=_listed([f"out{site}" for site in range(len(widths))]),
        SITES=len(widths),
        TOTAL=sum(widths),
        THREADS=EXPAND_THREADS,
    )


def _versions(num_versions: int) -> str:
    return _listed([f"version{place}" for place in range(num_versions)])


def _row_at(num_versions: int) -> str:
    """How a place becomes a row. With one version rows are not sorted: that saves waiting for their numbers."""
    is_sorted = num_versions > 1
    return _filled(_ROW_AT, PLACE="order[place / tokens * 2] * tokens + place % tokens" if is_sorted else "place")


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _filled(source: str, **names: object) -> str:
    for name, value in names.items():
        source = source.replace(name, str(value))
    return source
