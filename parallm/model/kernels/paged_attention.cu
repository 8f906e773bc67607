// One new token of each row attends to the keys and values in its pages, on tensor cores, and writes its own there.
// T type, HEAD size, HEADS key-value heads, REPEATS queries of each, TILE of which a block serves, PAGE positions. DIMS
// values of each head are rotated by a row's `angles` (0: none), neighbours with each other if PAIRED. Queries, new keys
// and new values may be columns of one product: the first row's begin at `*_start`, the next row's `*_pitch` values
// after. `pages` and `counts` are those of paged_attention_plan.cu.
// `shares` blocks have as many of all rows' pages, for each tile of queries. Where a row ends in the share that it began
// in, its result is written; otherwise its parts are `sums`, and `scales`: largest score times log2_scale, and total. A
// share has at most two, of its first row and of its last. The block that is the last to write a part merges them.
// Each warp has 16 positions of a page, and fetches, waits for and multiplies them without the other warps.
#include "pack.cuh"
#include "mma.cuh"
#include "flash_attention.cuh"
#include "rotation.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    paged_attention(const T* queries, const T* new_keys, const T* new_values, const T* keys, const T* values,
                    const int4* pages, const int* counts, const float* angles,
#if SINKS
                    const float* sinks,
#endif
                    T* attended, float* sums_of_parts, float* scales, int shares, int window, float log2_scale,
                    int queries_start, int queries_pitch, int keys_start, int keys_pitch, int values_start,
                    int values_pitch) {
  constexpr int KEYS = PAGE / WARPS, BUFFER = 2 * KEYS * PITCH;  // of a warp: keys, then values
  constexpr int TILES = REPEATS / TILE, QUERIES = HEADS * REPEATS, HALVES = (TILE + 7) / 8;
  constexpr float LEAST = -1e30f;  // finite: the difference of two is a number
  static_assert(KEYS == 16 && PAGE == COLUMNS, "a warp multiplies 16 positions");
  extern __shared__ __align__(16) unsigned char shared[];
  T* query_rows = reinterpret_cast<T*>(shared);
  T* buffers = query_rows + 16 * PITCH;  // (STAGES, WARPS, BUFFER)
  __shared__ float2 warp_scales[WARPS][TILE];
  __shared__ bool is_last;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile = blockIdx.x % TILES, head = blockIdx.x / TILES % HEADS;
  const unsigned share = blockIdx.x / (TILES * HEADS), num_pages = counts[0];
  const unsigned num_shares = min(unsigned(shares), num_pages);
  if (share >= num_shares) return;
  auto begin_of = [&](unsigned of_share) { return int(num_pages * of_share / num_shares); };
  const int begin = begin_of(share), end = begin_of(share + 1);
  auto share_of = [&](int index) { return int(((index + 1) * num_shares - 1) / num_pages); };
  const int first_query = head * REPEATS + tile * TILE;

  auto angles_of = [&](int row) { return reinterpret_cast<const float2*>(angles) + int64_t(row) * (DIMS / 2); };
  auto load_queries = [&](int row) {
    const T* from = queries + queries_start + int64_t(row) * queries_pitch + first_query * HEAD;
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE * VECTORS; i += THREADS) {
      const int m = i / VECTORS, at = i % VECTORS * 8;
      *reinterpret_cast<Pack<T>*>(query_rows + m * PITCH + at) = rotated_vector(from + m * HEAD, at, angles_of(row));
    }
  };
  // Copies this warp's positions of a page; the newest one comes from the new key and value, and goes to the page
  auto copy_page = [&](const int4& page, int stage) {
    const int start = page.z + warp * KEYS, newest = page.w - start;
    if (newest < 0) return;
    T* to = buffers + (stage * WARPS + warp) * BUFFER;
    const int64_t from = ((int64_t(page.y) * HEADS + head) * PAGE + warp * KEYS) * HEAD;
#pragma unroll
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
      const Pack<T> found =
          is_value ? *reinterpret_cast<const Pack<T>*>(new_values + values_start + int64_t(page.x) * values_pitch +
                                                       head * HEAD + at)
                   : rotated_vector(new_keys + keys_start + int64_t(page.x) * keys_pitch + head * HEAD, at,
                                    angles_of(page.x));
      *reinterpret_cast<Pack<T>*>(to + (is_value * KEYS + newest) * PITCH + at) = found;
      T* pool = const_cast<T*>(is_value ? values : keys) + from + newest * HEAD + at;
      if (tile == 0) *reinterpret_cast<Pack<T>*>(pool) = found;
    }
  };

#pragma unroll 1
  for (int i = TILE * VECTORS + threadIdx.x; i < 16 * VECTORS; i += THREADS)
    *reinterpret_cast<uint4*>(query_rows + i / VECTORS * PITCH + i % VECTORS * 8) = make_uint4(0, 0, 0, 0);
  Tile<HEAD> sums = {};
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
  int4 ahead = pages[begin], next = ahead;  // the pages that are copied and multiplied next
  int row = -1;                             // of the queries in shared memory
#pragma unroll 1
  for (int i = begin - STAGES + 1, stage = 0; i < end; i++) {
    wait_copies<STAGES - 2>();
    __syncwarp();
    if (i + STAGES - 1 < end) copy_page(ahead, stage);
    commit_copies();
    ahead = pages[min(i + STAGES, end - 1)];
    stage = stage == STAGES - 1 ? 0 : stage + 1;  // of the oldest page
    if (i < begin) continue;
    const int4 now = next;
    next = pages[min(i + 1, end - 1)];
    if (now.x != row) {
      row = now.x;
      load_queries(row);
      __syncthreads();
    }
    const int start = now.z + warp * KEYS, length = now.w, low = window > 0 ? length + 1 - window : 0;
    T* own = buffers + (stage * WARPS + warp) * BUFFER;
    if (start <= length && start + KEYS > low) {
      Tile<KEYS> score = {};
      multiply_rows<KEYS>(score, address_of(query_rows), address_of(own), lane);
#pragma unroll
      for (int r = 0; r < HALVES; r++) {
        if (start + KEYS > length + 1 || start < low)
#pragma unroll
          for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const int at = start + n * 8 + lane % 4 * 2 + e;
              if (at > length || at < low) score[0][n][2 * r + e] = -INFINITY;
            }
        float most = largest[r];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) most = fmaxf(most, fmaxf(score[0][n][2 * r], score[0][n][2 * r + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));  // of at least one position that is seen
        const float base = most * log2_scale, shrink = exp2_of(largest[r] * log2_scale - base);
        largest[r] = most;
        total[r] *= shrink;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            score[0][n][2 * r + e] = exp2_of(score[0][n][2 * r + e] * log2_scale - base);
            total[r] += score[0][n][2 * r + e];
          }
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
          sums[0][n][2 * r] *= shrink;
          sums[0][n][2 * r + 1] *= shrink;
        }
      }
      multiply_columns<KEYS>(sums, score, address_of(own + KEYS * PITCH), lane);
    }

    if (i + 1 == end || next.x != now.x) {  // alike in all warps: the row's pages in this share end here
      const int first_page = max(0, low) / PAGE;
      // Sums of a warp, (16, PITCH), in place of its keys and values
      __syncwarp();
      float* own_sums = reinterpret_cast<float*>(own);
#pragma unroll
      for (int r = 0; r < HALVES; r++) {
        const int m = r * 8 + lane / 4;
        float all = total[r];
        all += __shfl_xor_sync(~0u, all, 1);
        all += __shfl_xor_sync(~0u, all, 2);
        if (m < TILE) {
          if (lane % 4 == 0)
            warp_scales[warp][m] = make_float2(largest[r] == -INFINITY ? LEAST : largest[r] * log2_scale, all);
#pragma unroll
          for (int n = 0; n < HEAD / 8; n++)
            *reinterpret_cast<float2*>(own_sums + m * PITCH + n * 8 + lane % 4 * 2) =
                make_float2(sums[0][n][2 * r], sums[0][n][2 * r + 1]);
        }
        largest[r] = -INFINITY;
        total[r] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[0][n][e] = 0.0f;
      __syncthreads();

      auto add = [](float4& found, float weight, const float4& more) {
        found.x += weight * more.x;
        found.y += weight * more.y;
        found.z += weight * more.z;
        found.w += weight * more.w;
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
      const int row_begin = i - (now.z / PAGE - first_page), row_end = row_begin + length / PAGE - first_page + 1;
      const bool is_whole = row_begin >= begin && row_end <= end;
      // The row's shares, and the parts that are theirs: a share's second one if the row begins inside of it
      const int first_share = row_begin >= begin ? int(share) : share_of(row_begin);
      const int first_part = 2 * first_share + (row_begin > begin_of(first_share));
      auto place_of = [&](int of_share, int m) {
        return int64_t(of_share == first_share ? first_part : 2 * of_share) * QUERIES + first_query + m;
      };
      const float* all_sums = reinterpret_cast<const float*>(buffers + stage * WARPS * BUFFER);
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
          const int64_t place = place_of(share, m);
          *reinterpret_cast<float4*>(sums_of_parts + place * HEAD + d) = found;
          if (d == 0) reinterpret_cast<float2*>(scales)[place] = make_float2(most, all);
        }
      }
      if (!is_whole) {
        const int last_share = share_of(row_end - 1);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
          const unsigned most = last_share - first_share;
          unsigned* ended = reinterpret_cast<unsigned*>(const_cast<int*>(counts)) + 1;
          is_last = atomicInc(ended + (row * HEADS + head) * TILES + tile, most) == most;  // which makes it zero again
        }
        __syncthreads();
        if (is_last) {
          __threadfence();
#pragma unroll 1
          for (int v = threadIdx.x; v < TILE * HEAD / 4; v += THREADS) {
            const int m = v / (HEAD / 4), d = v % (HEAD / 4) * 4;
            auto scale_of = [&](int s) { return __ldcg(reinterpret_cast<const float2*>(scales) + place_of(s, m)); };
            float most = LEAST, all = 0.0f;
            float4 found = {};
#pragma unroll 4
            for (int s = first_share; s <= last_share; s++) most = fmaxf(most, scale_of(s).x);
#pragma unroll 4
            for (int s = first_share; s <= last_share; s++) {
              const float2 scale = scale_of(s);
              const float weight = exp2_of(scale.x - most);
              all += weight * scale.y;
              add(found, weight, __ldcg(reinterpret_cast<const float4*>(sums_of_parts + place_of(s, m) * HEAD + d)));
            }
            write(m, d, most, all, found);
          }
        }
      }
      __syncthreads();
    }
  }
}
