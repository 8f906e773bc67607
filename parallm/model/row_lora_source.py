"""Sources of the kernels in `row_lora`.

T type of all arrays but the sums, K columns of all A of a group, VERSIONS adapters, TILE rows that a block serves:
constants. Rows of one tile that use the same adapter one after the other read its factors once.
"""

from collections.abc import Sequence
from itertools import accumulate

SHRINK_THREADS = 128  # of a block
EXPAND_THREADS = 64

_OWN = """
  const T* own[TILE];  // null for rows without an adapter
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    int version = index[min(first + t, rows - 1) / tokens];
    own[t] = version < 0 ? nullptr : factors[version];
  }
"""
_SHRINK = """
  using P = Pack<T>;
  constexpr int COLUMNS = K / P::size, LANES = THREADS / COLUMNS;
  __shared__ float given[TILE][CHUNK], found[LANES][TILE][K];
  const int tokens = x_shape[1], rows = x_shape[0] * tokens, width = x_shape[2];
  const int first = blockIdx.x * TILE, begin = blockIdx.y * CHUNK, count = min(CHUNK, width - begin);
  const T* factors[] = {FACTORS};
  OWN
  for (int i = threadIdx.x; i < TILE * CHUNK / P::size; i += THREADS) {
    int t = i / (CHUNK / P::size), c = i % (CHUNK / P::size) * P::size;
    if (first + t >= rows || c >= count) continue;
    P values = *reinterpret_cast<const P*>(x + int64_t(first + t) * width + begin + c);
#pragma unroll
    for (int j = 0; j < P::size; j++) given[t][c + j] = float(values.values[j]);
  }
  __syncthreads();

  const int column = threadIdx.x % COLUMNS * P::size, lane = threadIdx.x / COLUMNS;
  float sum[TILE][P::size] = {};
  if (lane < LANES) {
#pragma unroll 4
    for (int c = lane; c < count; c += LANES) {
      P factor;
#pragma unroll
      for (int t = 0; t < TILE; t++) {
        if (own[t] == nullptr) continue;
        if (t == 0 || own[t] != own[t - 1])
          factor = *reinterpret_cast<const P*>(own[t] + int64_t(begin + c) * K + column);
        float value = given[t][c];
#pragma unroll
        for (int j = 0; j < P::size; j++) sum[t][j] += value * float(factor.values[j]);
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
    for (int l = 0; l < LANES; l++) total += found[l][t][k];
    parts[(int64_t(blockIdx.y) * rows + first + t) * K + k] = total;
  }
"""
_EXPAND = """
  using P = Pack<T>;
  const int tokens = y_shape[1], rows = y_shape[0] * tokens, first = blockIdx.y * TILE;
  HIDDEN
  int vector = blockIdx.x * THREADS + threadIdx.x;
  SITES
"""
_HIDDEN = """
  __shared__ float hidden[TILE][K];
  for (int i = threadIdx.x; i < TILE * K; i += THREADS) {
    int row = min(first + i / K, rows - 1);
    float total = 0.0f;
    for (int p = 0; p < parts_shape[0]; p++) total += parts[(int64_t(p) * rows + row) * K + i % K];
    hidden[i / K][i % K] = total;
  }
  __syncthreads();
"""
_SITE = """
  if (vector * P::size < WIDTH) {
    float sum[TILE][P::size];
#pragma unroll
    for (int t = 0; t < TILE; t++) {
      int64_t row = min(first + t, rows - 1);
      P values = *reinterpret_cast<const P*>(y + row * TOTAL + START + vector * P::size);
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
      *reinterpret_cast<P*>(OUTPUT + int64_t(first + t) * WIDTH + vector * P::size) = values;
    }
    return;
  }
  vector -= WIDTH / P::size;
"""
_ADDED = """
    const T* factors[] = {FACTORS};
    OWN
#pragma unroll 4
    for (int r = 0; r < RANK; r++) {
      P factor;
#pragma unroll
      for (int t = 0; t < TILE; t++) {
        if (own[t] == nullptr) continue;
        if (t == 0 || own[t] != own[t - 1])
          factor = *reinterpret_cast<const P*>(own[t] + int64_t(r) * WIDTH + vector * P::size);
        float value = hidden[t][COLUMN + r];
#pragma unroll
        for (int j = 0; j < P::size; j++) sum[t][j] += value * float(factor.values[j]);
      }
    }
"""


def shrink_source(num_versions: int) -> str:
    """Inputs `x` (B, T, I), `index` (B,) and `a0`, `a1`, ... (I, K); output `parts`: sums over each chunk of I."""
    return _filled(_SHRINK, OWN=_OWN, FACTORS=_named("a", num_versions), THREADS=SHRINK_THREADS)


def expand_source(widths: Sequence[int], ranks: Sequence[int], num_versions: int) -> str:
    """Inputs `y` (B, T, sum of widths) and, where there are versions, `parts`, `index` and for each site s `bs_0`,
    `bs_1`, ... (R, O); outputs `out0`, `out1`, ... of each site."""
    starts, columns = [0, *accumulate(widths)], [0, *accumulate(ranks)]
    sites = []
    for site, width in enumerate(widths):
        names = {"WIDTH": width, "TOTAL": starts[-1], "START": starts[site], "OUTPUT": f"out{site}"}
        if num_versions:
            names |= {"RANK": ranks[site], "COLUMN": columns[site], "FACTORS": _named(f"b{site}_", num_versions)}
        sites.append(_filled(_SITE, ADDED=_ADDED if num_versions else "", OWN=_OWN, **names))
    return _filled(_EXPAND, HIDDEN=_HIDDEN if num_versions else "", SITES="".join(sites), THREADS=EXPAND_THREADS)


def _named(prefix: str, count: int) -> str:
    return ", ".join(f"{prefix}{version}" for version in range(count))


def _filled(source: str, **names: object) -> str:
    for name, value in names.items():
        source = source.replace(name, str(value))
    return source
