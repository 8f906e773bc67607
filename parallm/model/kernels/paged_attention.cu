// One new token of each row attends to the keys and values in its pages, on tensor cores, and writes its own there.
// T type, HEAD size, HEADS key-value heads, REPEATS queries of each, TILE of which a block serves, PAGE positions. DIMS
// values of each head are rotated by a row's `angles` (0: none), neighbours with each other if PAIRED. Queries, new
// keys and new values may be columns of one product: the first row's begin at `*_start`, the next row's `*_pitch`
// values after. `pages` and the three arrays behind are those of paged_attention_plan.cu; the three are written.
// Each share of the list has a block for each tile of queries. Where a row ends in the share that it began in, its
// result is written; otherwise its parts are `part_sums`, and `part_scales`: largest score times log2_scale, and total. A
// share has at most two, of its first row and of its last. The block that is the last to write a part merges them.
// Each warp has 16 positions of a page, and fetches, waits for and multiplies them without the other warps. In a step
// the weights of other layers have driven everything out of the caches. So nothing small is waited for alone: a row's
// queries, new key and value and their angles are copied with its pages; and loops are unrolled only where registers
// need it, because a thousand instructions take 2 microseconds to come.
#include "dependent.cuh"
#include "pack.cuh"
#include "mma.cuh"
#include "matrices.cuh"
#include "flash_attention.cuh"
#include "rotation.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    paged_attention(const T* queries, const T* new_keys, const T* new_values, const T* keys, const T* values,
                    const int4* pages, const int* counts, const float* part_sums, const float* part_scales,
                    const float* angles,
#if SINKS
                    const float* sinks,
#endif
                    T* attended, int stride, int window, float log2_scale, int queries_start, int queries_pitch,
                    int keys_start, int keys_pitch, int values_start, int values_pitch) {
  wait_for_inputs();
  constexpr int KEYS = PAGE / WARPS, BUFFER = 2 * KEYS * PITCH;  // of a warp: keys, then values
  constexpr int TILES = REPEATS / TILE, QUERIES = HEADS * REPEATS, HALVES = (TILE + 7) / 8;
  constexpr int ANGLES = 2 * DIMS, SIDE = TILE * PITCH + 2 * ANGLES;  // queries, their angles, those of the new key
  constexpr float LEAST = -1e30f;  // finite: the difference of two is a number
  static_assert(KEYS == 16 && PAGE == COLUMNS, "a warp multiplies 16 positions");
  extern __shared__ __align__(16) unsigned char shared[];
  T* sides = reinterpret_cast<T*>(shared);  // (STAGES, SIDE)
  T* buffers = sides + STAGES * SIDE;       // (STAGES, WARPS, BUFFER)
  __shared__ float2 warp_scales[WARPS][TILE];
  __shared__ bool is_last;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile = blockIdx.x % TILES, head = blockIdx.x / TILES % HEADS, share = blockIdx.x / (TILES * HEADS);
  const int4* own_pages = pages + int64_t(share) * stride;
  int4 ahead = own_pages[0], next = ahead;  // the pages that are copied and multiplied next
  const int of_share = counts[0], begin = share * of_share, count = min(of_share, counts[1] - begin);
  if (ahead.x < 0) return;
  const int first_query = head * REPEATS + tile * TILE;

  auto copy_angles = [&](T* to, int row, int thread, int threads) {
    const T* from = reinterpret_cast<const T*>(angles) + int64_t(row) * ANGLES;
    for (int i = thread; i < ANGLES / 8; i += threads) copy_vector(address_of(to + i * 8), from + i * 8, true);
  };
  // Copies this warp's positions of a page, and of a row that is not the one before its queries
  auto copy_page = [&](const int4& page, int stage, bool is_new) {
    T* side = sides + stage * SIDE;
    if (is_new) {
      const T* from = queries + queries_start + int64_t(page.x) * queries_pitch + first_query * HEAD;
#pragma unroll 1
      for (int i = threadIdx.x; i < TILE * VECTORS; i += THREADS)
        copy_vector(address_of(side + i / VECTORS * PITCH + i % VECTORS * 8), from + i * 8, true);
      copy_angles(side + TILE * PITCH, page.x, threadIdx.x, THREADS);
    }
    const int newest = page.w - page.z - warp * KEYS;
    if (newest < 0) return;
    T* to = buffers + (stage * WARPS + warp) * BUFFER;
    const int64_t from = ((int64_t(page.y) * HEADS + head) * PAGE + warp * KEYS) * HEAD;
#pragma unroll 2
    for (int i = lane; i < KEYS * VECTORS; i += 32) {
      const int position = i / VECTORS, at = i % VECTORS * 8;
      if (position == newest) continue;
      copy_vector(address_of(to + position * PITCH + at), keys + from + i * 8, position < newest);
      copy_vector(address_of(to + (KEYS + position) * PITCH + at), values + from + i * 8, position < newest);
    }
    if (newest >= KEYS) return;
#pragma unroll 1
    for (int i = lane; i < 2 * VECTORS; i += 32) {
      const bool is_value = i >= VECTORS;
      const int at = i % VECTORS * 8;
      const T* row = is_value ? new_values + values_start + int64_t(page.x) * values_pitch
                              : new_keys + keys_start + int64_t(page.x) * keys_pitch;
      copy_vector(address_of(to + (is_value * KEYS + newest) * PITCH + at), row + head * HEAD + at, true);
    }
    copy_angles(side + TILE * PITCH + ANGLES, page.x, lane, 32);
  };

  // A row's queries as the left factor of products: a register has two values of each 8
  struct alignas(4) Pair {
    T values[2];
  };
  unsigned query[HALVES][VECTORS];
  auto load_queries = [&](const T* side) {
    const float2* turns = reinterpret_cast<const float2*>(side + TILE * PITCH);
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      const int m = h * 8 + lane / 4;
      auto pair_at = [&](int v) { return *reinterpret_cast<const Pair*>(side + m * PITCH + v * 8 + lane % 4 * 2); };
#pragma unroll
      for (int v = 0; v < VECTORS; v++) query[h][v] = 0;
      if (m >= TILE) continue;
#pragma unroll
      for (int v = DIMS / 8; v < VECTORS; v++) {
        const Pair raw = pair_at(v);
        query[h][v] = pack_values(float(raw.values[0]), float(raw.values[1]));
      }
#pragma unroll
      for (int v = 0; v < DIMS / (PAIRED ? 8 : 16); v++) {
        const Pair first = pair_at(v);
        const float one = float(first.values[0]), two = float(first.values[1]);
#if PAIRED
        const float2 turn = turns[v * 4 + lane % 4];
        query[h][v] = pack_values(one * turn.x - two * turn.y, one * turn.y + two * turn.x);
#else
        const Pair second = pair_at(v + DIMS / 16);
        const float three = float(second.values[0]), four = float(second.values[1]);
        const float4 turn = *reinterpret_cast<const float4*>(turns + v * 8 + lane % 4 * 2);
        query[h][v] = pack_values(one * turn.x - three * turn.y, two * turn.z - four * turn.w);
        query[h][v + DIMS / 16] = pack_values(one * turn.y + three * turn.x, two * turn.w + four * turn.z);
#endif
      }
    }
  };
  // Rotates the new key that was copied, and writes it and the new value to the page
  auto write_newest = [&](T* own, const T* side, const int4& page, int newest) {
    const int64_t to = (((int64_t(page.y) * HEADS + head) * PAGE) + warp * KEYS + newest) * HEAD;
    const float2* turns = reinterpret_cast<const float2*>(side + TILE * PITCH + ANGLES);
#pragma unroll 1
    for (int first = 0; first < 2 * VECTORS; first += 32) {  // all of the key in the first turn
      const int i = first + lane, at = i % VECTORS * 8;
      const bool is_value = i >= VECTORS, is_inside = i < 2 * VECTORS;
      T* row = own + (is_value * KEYS + newest) * PITCH;
      Pack<T> found;
      if (is_inside) found = is_value ? *reinterpret_cast<const Pack<T>*>(row + at) : rotated_vector(row, at, turns);
      __syncwarp();
      if (!is_inside) continue;
      *reinterpret_cast<Pack<T>*>(row + at) = found;
      if (tile == 0) *reinterpret_cast<Pack<T>*>(const_cast<T*>(is_value ? values : keys) + to + at) = found;
    }
    __syncwarp();
  };
  auto add = [](float4& found, float factor, const float4& more) {
    found.x += factor * more.x;
    found.y += factor * more.y;
    found.z += factor * more.z;
    found.w += factor * more.w;
  };

  Tile<HEAD> sums;
  float largest[HALVES], total[HALVES];
  int row = -1;  // of the queries in registers
#pragma unroll 1
  for (int i = 1 - STAGES, stage = STAGES > 1, copied_row = -1; i < count; i++) {
    wait_copies<STAGES - 2>();
    if (i >= 0 && next.x != row) {
      __syncthreads();  // all warps have what they copied, and have read the sums of the row before
      row = next.x;
      load_queries(sides + stage * SIDE);
#pragma unroll
      for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[0][n][e] = 0.0f;
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        largest[h] = -INFINITY;
        total[h] = 0.0f;
      }
      __syncthreads();
    }
    __syncwarp();
    if (i + STAGES - 1 < count) {
      copy_page(ahead, stage == 0 ? STAGES - 1 : stage - 1, ahead.x != copied_row);
      copied_row = ahead.x;
    }
    commit_copies();
    ahead = own_pages[min(i + STAGES, count - 1)];
    const int of_page = stage;
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    if (i < 0) continue;
    const int4 now = next;
    next = own_pages[min(i + 1, count - 1)];
    const int start = now.z + warp * KEYS, length = now.w, low = window > 0 ? length + 1 - window : 0;
    T* own = buffers + (of_page * WARPS + warp) * BUFFER;
    if (start <= length && start + KEYS > length) write_newest(own, sides + of_page * SIDE, now, length - start);
    if (start <= length && start + KEYS > low) {
      Tile<KEYS> score = {};
#pragma unroll
      for (int k = 0; k < HEAD / 16; k++) {
        unsigned key[4];
        load_matrices(key, address_of(own + (lane % 8 + lane / 16 * 8) * PITCH + k * 16 + lane / 8 % 2 * 8));
#pragma unroll
        for (int n = 0; n < 2; n++)
          multiply<T>(score[0][n], query[0][2 * k], HALVES > 1 ? query[HALVES - 1][2 * k] : 0, query[0][2 * k + 1],
                      HALVES > 1 ? query[HALVES - 1][2 * k + 1] : 0, key[2 * n], key[2 * n + 1]);
      }
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        if (start + KEYS > length + 1 || start < low)
#pragma unroll
          for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const int at = start + n * 8 + lane % 4 * 2 + e;
              if (at > length || at < low) score[0][n][2 * h + e] = -INFINITY;
            }
        float most = largest[h];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) most = fmaxf(most, fmaxf(score[0][n][2 * h], score[0][n][2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));  // of at least one position that is seen
        const float base = most * log2_scale, shrink = exp2_of(largest[h] * log2_scale - base);
        largest[h] = most;
        total[h] *= shrink;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            score[0][n][2 * h + e] = exp2_of(score[0][n][2 * h + e] * log2_scale - base);
            total[h] += score[0][n][2 * h + e];
          }
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
          sums[0][n][2 * h] *= shrink;
          sums[0][n][2 * h + 1] *= shrink;
        }
      }
      multiply_columns<KEYS>(sums, score, address_of(own + KEYS * PITCH), lane);
    }
    if (i + 1 < count && next.x == row) continue;

    // The row's pages in this share end here, for all warps: a warp's sums, (16, PITCH), take the place of its keys
    __syncwarp();
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      const int m = h * 8 + lane / 4;
      float all = total[h];
      all += __shfl_xor_sync(~0u, all, 1);
      all += __shfl_xor_sync(~0u, all, 2);
      if (m >= TILE) continue;
      if (lane % 4 == 0)
        warp_scales[warp][m] = make_float2(largest[h] == -INFINITY ? LEAST : largest[h] * log2_scale, all);
#pragma unroll
      for (int n = 0; n < HEAD / 8; n++)
        *reinterpret_cast<float2*>(reinterpret_cast<float*>(own) + m * PITCH + n * 8 + lane % 4 * 2) =
            make_float2(sums[0][n][2 * h], sums[0][n][2 * h + 1]);
    }
    __syncthreads();
    // The row's pages in the list, its shares, and their parts: a share's second one if the row begins inside
    const int first_page = max(0, low) / PAGE, row_begin = begin + i - (now.z / PAGE - first_page);
    const int row_end = row_begin + length / PAGE - first_page + 1;
    const int first_share = row_begin / of_share, last_share = (row_end - 1) / of_share;
    const bool is_whole = first_share == last_share;
    auto place_of = [&](int of, int m) {
      return int64_t(2 * of + (of == first_share && row_begin > of * of_share)) * QUERIES + first_query + m;
    };
    auto write = [&](int m, int d, float most, float all, const float4& found) {
      float shrink = 1.0f;
#if SINKS
      const float sink = sinks[first_query + m] * LOG2E, base = fmaxf(most, sink);
      shrink = exp2_of(most - base);
      all = all * shrink + exp2_of(sink - base);
#endif
      const float scale = shrink / all;
      struct alignas(8) Four {
        T values[4];
      };
      *reinterpret_cast<Four*>(attended + (int64_t(row) * QUERIES + first_query + m) * HEAD + d) =
          Four{T(found.x * scale), T(found.y * scale), T(found.z * scale), T(found.w * scale)};
    };
    const float* all_sums = reinterpret_cast<const float*>(buffers + of_page * WARPS * BUFFER);
#pragma unroll 1
    for (int v = threadIdx.x; v < TILE * HEAD / 4; v += THREADS) {
      const int m = v / (HEAD / 4), d = v % (HEAD / 4) * 4;
      float most = LEAST, all = 0.0f;
      float4 found = {};
#pragma unroll
      for (int w = 0; w < WARPS; w++) most = fmaxf(most, warp_scales[w][m].x);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float2 scale = warp_scales[w][m];
        const float weight = exp2_of(scale.x - most);
        all += weight * scale.y;
        add(found, weight, *reinterpret_cast<const float4*>(all_sums + (w * 16 + m) * PITCH + d));
      }
      if (is_whole) {
        write(m, d, most, all, found);
      } else {
        *reinterpret_cast<float4*>(const_cast<float*>(part_sums) + place_of(share, m) * HEAD + d) = found;
        if (d == 0)
          reinterpret_cast<float2*>(const_cast<float*>(part_scales))[place_of(share, m)] = make_float2(most, all);
      }
    }
    if (is_whole) continue;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const unsigned most = last_share - first_share;
      unsigned* ended = reinterpret_cast<unsigned*>(const_cast<int*>(counts)) + 2;
      is_last = atomicInc(ended + (row * HEADS + head) * TILES + tile, most) == most;  // which makes it zero again
    }
    __syncthreads();
    if (!is_last) continue;
    __threadfence();
#pragma unroll 1
    for (int v = threadIdx.x; v < TILE * HEAD / 4; v += THREADS) {
      const int m = v / (HEAD / 4), d = v % (HEAD / 4) * 4;
      float most = LEAST, all = 0.0f;
      float4 found = {};
#pragma unroll 2
      for (int s = first_share; s <= last_share; s++) {
        const float2 scale = __ldcg(reinterpret_cast<const float2*>(part_scales) + place_of(s, m));
        const float4 more = __ldcg(reinterpret_cast<const float4*>(part_sums + place_of(s, m) * HEAD + d));
        const float base = fmaxf(most, scale.x), shrink = exp2_of(most - base), weight = exp2_of(scale.x - base);
        most = base;
        all = all * shrink + weight * scale.y;
        found = make_float4(found.x * shrink, found.y * shrink, found.z * shrink, found.w * shrink);
        add(found, weight, more);
      }
      write(m, d, most, all, found);
    }
  }
}
