"""Sources of the kernels in `row_lora`.

T type of all arrays but the sums, K columns of all A of a group, VERSIONS adapters, TILE rows that a block serves:
constants. Rows of one tile that use the same adapter one after the other read its factors once.
"""

from collections.abc import Sequence
from itertools import accumulate

SHRINK_THREADS = 128  # of a block
EXPAND_THREADS = 64

_OWN = """
  const T* factors[] = {FACTORS};
  const T* own[TILE];  // null for rows without an adapter
  bool alike = true;
#pragma unroll
  for (int t = 0; t < TILE; t++) {
    int version = index[min(first + t, rows - 1) / tokens];
    own[t] = version < 0 ? nullptr : factors[version];
    alike = alike && own[t] == own[0];
  }
"""
_SHRINK = """
  using P = Pack<T>;
  constexpr int COLUMNS = K / P::size, LANES = THREADS / COLUMNS;
  __shared__ float given[TILE][CHUNK], found[LANES][TILE][K];
  const int tokens = x_shape[1], rows = x_shape[0] * tokens, width = x_shape[2];
  const int first = blockIdx.x * TILE, begin = blockIdx.y * CHUNK, count = min(CHUNK, width - begin);
  for (int i = threadIdx.x; i < TILE * CHUNK / P::size; i += THREADS) {
    int t = i / (CHUNK / P::size), c = i % (CHUNK / P::size) * P::size;
    if (first + t >= rows || c >= count) continue;
    P values = *reinterpret_cast<const P*>(x + int64_t(first + t) * width + begin + c);
#pragma unroll
    for (int j = 0; j < P::size; j++) given[t][c + j] = float(values.values[j]);
  }
  OWN
  __syncthreads();

  const int column = threadIdx.x % COLUMNS * P::size, lane = threadIdx.x / COLUMNS;
  float sum[TILE][P::size] = {};
  auto factor_at = [&](const T* a, int c) { return *reinterpret_cast<const P*>(a + int64_t(begin + c) * K + column); };
  auto add = [&](int t, float value, const P& factor) {
#pragma unroll
    for (int j = 0; j < P::size; j++) sum[t][j] += value * float(factor.values[j]);
  };
  if (lane < LANES) {
    if (alike && own[0] != nullptr) {
#pragma unroll 4
      for (int c = lane; c < count; c += LANES) {
        P factor = factor_at(own[0], c);
#pragma unroll
        for (int t = 0; t < TILE; t++) add(t, given[t][c], factor);
      }
    } else if (!alike) {
      for (int c = lane; c < count; c += LANES) {
        P factor;
#pragma unroll
        for (int t = 0; t < TILE; t++) {
          if (own[t] == nullptr) continue;
          if (t == 0 || own[t] != own[t - 1]) factor = factor_at(own[t], c);
          add(t, given[t][c], factor);
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
    int64_t row = min(first + t, rows - 1);
    P values = *reinterpret_cast<const P*>(y + row * TOTAL + start + vector * P::size);
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
    *reinterpret_cast<P*>(outputs[site] + int64_t(first + t) * width + vector * P::size) = values;
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
  auto factor_at = [&](const T* b, int r) {
    return *reinterpret_cast<const P*>(b + int64_t(r) * width + vector * P::size);
  };
  auto add = [&](int t, int r, const P& factor) {
    float value = reinterpret_cast<const float*>(hidden[t])[column + r];
#pragma unroll
    for (int j = 0; j < P::size; j++) sum[t][j] += value * float(factor.values[j]);
  };
  if (alike && own[0] != nullptr) {
    for (int r = 0; r < rank; r += 8) {  // ranks are multiples of 8; loads first, that they are under way together
      P factor[8];
#pragma unroll
      for (int u = 0; u < 8; u++) factor[u] = factor_at(own[0], r + u);
#pragma unroll
      for (int u = 0; u < 8; u++)
#pragma unroll
        for (int t = 0; t < TILE; t++) add(t, r + u, factor[u]);
    }
  } else if (!alike) {
    for (int r = 0; r < rank; r++) {
      P factor;
#pragma unroll
      for (int t = 0; t < TILE; t++) {
        if (own[t] == nullptr) continue;
        if (t == 0 || own[t] != own[t - 1]) factor = factor_at(own[t], r);
        add(t, r, factor);
      }
    }
  }
"""


def shrink_source(num_versions: int) -> str:
    """Inputs `x` (B, T, I), `index` (B,) and `a0`, `a1`, ... (I, K); output `parts`: sums over each chunk of I."""
    factors = _listed([f"a{version}" for version in range(num_versions)])
    return _filled(_SHRINK, OWN=_OWN, FACTORS=factors, THREADS=SHRINK_THREADS)


def expand_source(widths: Sequence[int], ranks: Sequence[int], num_versions: int) -> str:
    """Inputs `y` (B, T, sum of widths) and, where there are versions, `parts`, `index` and for each site s `bs_0`,
    `bs_1`, ... (R, O); outputs `out0`, `out1`, ... of each site."""
    sites = range(len(widths))
    factors = _listed([f"b{site}_{version}" for site in sites for version in range(num_versions)])
    source = _filled(_EXPAND, HIDDEN=_HIDDEN, ADDED=_ADDED) if num_versions else _filled(_EXPAND, HIDDEN="", ADDED="")
    return _filled(
        source,
        OWN=_OWN.replace("factors[version]", f"factors[site * {num_versions} + version]"),
        FACTORS=factors,
        WIDTHS=_listed(widths),
        RANKS=_listed(ranks),
        COLUMNS=_listed([0, *accumulate(ranks)][: len(ranks)]),
        OUTPUTS=_listed([f"out{site}" for site in sites]),
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
