// One new token of each row attends to the keys and values in its slot, and writes its own there.
// T type, D head size, H key-value heads, G queries of each, TILE of which a block serves, LANES of a team. Slots have
// `capacity` positions, of which the newest `window` are seen (0: all). DIMS values of each head are rotated by a row's
// `angles` (0: none), neighbours with each other if PAIRED. Queries, new keys and new values may be columns of one
// product: the first row's begin at `*_start`, the next row's `*_pitch` values after.
// PARTS: several blocks share a row, and write `sums`, `largests` and `totals` in its place.
#include "pack.cuh"

extern "C" __global__ void decode_attention(const T* queries, const T* new_keys, const T* new_values, const T* keys,
                                            const T* values, const int* slots, const int* lengths, const float* angles,
#if PARTS
                                            float* sums, float* largests, float* totals,
#else
                                            T* attended,
#endif
                                            int capacity, int window, float scale, int queries_start, int queries_pitch,
                                            int keys_start, int keys_pitch, int values_start, int values_pitch) {
  using P = Pack<T>;
  constexpr int PACKS = D / (LANES * P::size), SIZE = PACKS * P::size;  // of a lane
  constexpr int TEAMS = THREADS / LANES, TILES = G / TILE;
  constexpr int AHEAD = PACKS == 1 ? 4 : PACKS == 2 ? 2 : 1;  // tokens whose loads are under way together
  constexpr float LEAST = -1e30f;  // finite: the difference of two is a number
  __shared__ float team_largest[TEAMS][TILE], team_total[TEAMS][TILE], team_sums[TEAMS][TILE][D];

  const int lane = threadIdx.x % LANES, team = threadIdx.x / LANES;
  const int tile = blockIdx.x % TILES;
  const int64_t head = blockIdx.x / TILES;  // row and key-value head
  const int length = lengths[head / H];
  const int part = ((capacity + gridDim.y - 1) / gridDim.y + PART_UNIT - 1) / PART_UNIT * PART_UNIT;
  const int first = window > 0 ? max(0, length + 1 - window) : 0;
  const int begin = max(first, int(blockIdx.y) * part), end = min(length, (int(blockIdx.y) + 1) * part);
  const bool has_newest = int(blockIdx.y) == length / part;
  const int64_t first_query = head * G + tile * TILE;
  if (begin >= end && !has_newest) {
#if PARTS
    if (threadIdx.x < TILE) {
      largests[(first_query + threadIdx.x) * gridDim.y + blockIdx.y] = LEAST;
      totals[(first_query + threadIdx.x) * gridDim.y + blockIdx.y] = 0.0f;
    }
#endif
    return;
  }
  const int64_t row = head / H;

  auto values_at = [](const T* from) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(P) == 0) return *reinterpret_cast<const P*>(from);
    P found;
    for (int j = 0; j < P::size; j++) found.values[j] = from[j];
    return found;
  };
  // Queries and the new key, rotated, once for all teams
  constexpr int VECTORS = D / P::size, HALF = DIMS > 0 ? DIMS / 2 : 1;
  __shared__ P turned[TILE + 1][VECTORS];
  for (int i = threadIdx.x; i < (TILE + 1) * VECTORS; i += blockDim.x) {
    const int g = i / VECTORS, start = i % VECTORS * P::size;
    const bool is_key = g == TILE;
    const T* from = is_key ? new_keys + keys_start + row * keys_pitch + (head - row * H) * D
                           : queries + queries_start + row * queries_pitch + (first_query + g - row * H * G) * D;
    P own = values_at(from + start);
    if (start < DIMS) {
      const float2* angle = reinterpret_cast<const float2*>(angles) + row * HALF + (PAIRED ? start / 2 : start % HALF);
      if constexpr (PAIRED) {
#pragma unroll
        for (int j = 0; j < P::size; j += 2) {
          float left = float(own.values[j]), right = float(own.values[j + 1]);
          float2 turn = angle[j / 2];
          own.values[j] = T(left * turn.x - right * turn.y);
          own.values[j + 1] = T(left * turn.y + right * turn.x);
        }
      } else {
        const bool is_left = start < HALF;
        P other = values_at(from + (is_left ? start + HALF : start - HALF));
#pragma unroll
        for (int j = 0; j < P::size; j++) {
          float one = float(own.values[j]), two = float(other.values[j]);
          float2 turn = angle[j];
          own.values[j] = T(is_left ? one * turn.x - two * turn.y : two * turn.y + one * turn.x);
        }
      }
    }
    turned[g][i % VECTORS] = own;
  }
  const int64_t slot = (int64_t(slots[row]) * H + head % H) * capacity * D;
  auto place_of = [&](int position) { return slot + int64_t(position) * D; };
  __syncthreads();
  const T* key_pool = keys + lane * P::size;
  const T* value_pool = values + lane * P::size;
  auto pack = [](const T* from, int index) { return *reinterpret_cast<const P*>(from + index * LANES * P::size); };

  float query[TILE][SIZE], sum[TILE][SIZE], largest[TILE], total[TILE];
#pragma unroll
  for (int g = 0; g < TILE; g++) {
    largest[g] = LEAST;
    total[g] = 0.0f;
#pragma unroll
    for (int c = 0; c < PACKS; c++) {
      P raw = turned[g][c * LANES + lane];
#pragma unroll
      for (int j = 0; j < P::size; j++) {
        query[g][c * P::size + j] = float(raw.values[j]) * scale;
        sum[g][c * P::size + j] = 0.0f;
      }
    }
  }
  // Scores of one token, alike in all lanes of its team
  auto scores_of = [&](const P (&key)[PACKS], bool is_seen, float (&score)[TILE]) {
    float wide[SIZE];
#pragma unroll
    for (int e = 0; e < SIZE; e++) wide[e] = float(key[e / P::size].values[e % P::size]);
#pragma unroll
    for (int g = 0; g < TILE; g++) {
      float product = 0.0f;
#pragma unroll
      for (int e = 0; e < SIZE; e++) product += query[g][e] * wide[e];
#pragma unroll
      for (int step = LANES / 2; step > 0; step /= 2) product += __shfl_xor_sync(0xffffffff, product, step);
      score[g] = is_seen ? product : -INFINITY;
    }
  };
  // Make room in the sums of query g for scores up to `most`
  auto raise = [&](int g, float most) {
    float shrink = exp2f(largest[g] - most);
    largest[g] = most;
    total[g] *= shrink;
#pragma unroll
    for (int e = 0; e < SIZE; e++) sum[g][e] *= shrink;
  };
  auto add = [&](const P (&value)[PACKS], const float (&score)[TILE]) {
    float wide[SIZE];
#pragma unroll
    for (int e = 0; e < SIZE; e++) wide[e] = float(value[e / P::size].values[e % P::size]);
#pragma unroll
    for (int g = 0; g < TILE; g++) {
      float weight = exp2f(score[g] - largest[g]);
      total[g] += weight;
#pragma unroll
      for (int e = 0; e < SIZE; e++) sum[g][e] += weight * wide[e];
    }
  };

  for (int base = begin; base < end; base += TEAMS * AHEAD) {  // alike in all threads: `scores_of` needs whole warps
    P key[AHEAD][PACKS], value[AHEAD][PACKS];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      const int64_t place = place_of(min(base + u * TEAMS + team, end - 1));
#pragma unroll
      for (int c = 0; c < PACKS; c++) {
        key[u][c] = pack(key_pool + place, c);
        value[u][c] = pack(value_pool + place, c);
      }
    }
    float score[AHEAD][TILE];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) scores_of(key[u], base + u * TEAMS + team < end, score[u]);
#pragma unroll
    for (int g = 0; g < TILE; g++) {
      float most = largest[g];
#pragma unroll
      for (int u = 0; u < AHEAD; u++) most = fmaxf(most, score[u][g]);
      raise(g, most);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; u++) add(value[u], score[u]);
  }

  if (has_newest) {
    P key[PACKS], value[PACKS];
    float score[TILE];
#pragma unroll
    for (int c = 0; c < PACKS; c++) {
      const T* from = new_values + values_start + row * values_pitch + (head - row * H) * D;
      key[c] = turned[TILE][c * LANES + lane];
      value[c] = values_at(from + (c * LANES + lane) * P::size);
      if (team == 0 && tile == 0) {
        const int64_t place = place_of(length) + c * LANES * P::size;
        *reinterpret_cast<P*>(const_cast<T*>(key_pool + place)) = key[c];
        *reinterpret_cast<P*>(const_cast<T*>(value_pool + place)) = value[c];
      }
    }
    scores_of(key, team == 0, score);
#pragma unroll
    for (int g = 0; g < TILE; g++) raise(g, fmaxf(largest[g], score[g]));
    add(value, score);
  }

#pragma unroll
  for (int g = 0; g < TILE; g++) {
    if (lane == 0) {
      team_largest[team][g] = largest[g];
      team_total[team][g] = total[g];
    }
#pragma unroll
    for (int e = 0; e < SIZE; e++)
      team_sums[team][g][(e / P::size * LANES + lane) * P::size + e % P::size] = sum[g][e];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TILE * D; i += blockDim.x) {
    int g = i / D, d = i % D;
    float most = LEAST, all = 0.0f, found = 0.0f;
    for (int t = 0; t < TEAMS; t++) most = fmaxf(most, team_largest[t][g]);
    for (int t = 0; t < TEAMS; t++) {
      float weight = exp2f(team_largest[t][g] - most);
      all += weight * team_total[t][g];
      found += weight * team_sums[t][g][d];
    }
#if PARTS
    int64_t place = (first_query + g) * gridDim.y + blockIdx.y;
    sums[place * D + d] = found;
    if (d == 0) {
      largests[place] = most;
      totals[place] = all;
    }
#else
    attended[(first_query + g) * D + d] = T(found / all);
#endif
  }
}
