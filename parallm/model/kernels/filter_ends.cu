// Where top-k and top-p end in each row of V logits; see token_filter.py.

extern "C" __global__ void filter_ends(const float* scaled, const float* exponentials, const float* largest,
                                       const float* sums, const uint64_t* top_k, const uint64_t* top_p, float* lowest,
                                       int* last) {
  using Packed = unsigned long long;
  constexpr int count_bits = 20, bins = 2048, no_bin = -1;
  constexpr Packed count_mask = (1 << count_bits) - 1;
  __shared__ Packed packed[bins], warp_sums[32], before_found, size_found;
  __shared__ int found;
  int64_t row = blockIdx.x;
  const float* values = scaled + row * V;
  const float* weights = exponentials + row * V;
  float most = largest[row], total = sums[row];
  Packed most_tokens = top_k[row], most_mass = top_p[row], before = 0;
  auto keeps_next = [&](Packed sum) { return (sum & count_mask) < most_tokens && (sum >> count_bits) < most_mass; };
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int distance = 0, id_high = 0, last_id = V - 1;
  uint32_t order = 0;  // of the lowest kept logit, as far as it is known; the largest logit has the smallest
  for (int level = 0; level < 6; level++) {
    for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) packed[bin] = 0;
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    for (int start = 0; start < V; start += blockDim.x) {
      int id = start + threadIdx.x, bin = no_bin;
      Packed one = 0;
      if (id < V) {
        float value = __fadd_rn(values[id], 0.0f);  // one zero instead of two
        uint32_t bits = __float_as_uint(value), place = bits >> 31 ? bits : ~bits & 0x7fffffffu;
        int away = int(fminf((most - value) * 64.0f, float(bins - 1)));
        if (level == 0) bin = away;
        else if (away == distance) {
          if (level == 1) bin = place >> 21;
          else if (level == 2 && place >> 21 == order >> 21) bin = (place >> 10) & 2047;
          else if (level == 3 && place >> 10 == order >> 10) bin = place & 1023;
          else if (level == 4 && place == order) bin = id >> 10;
          else if (level == 5 && place == order && id >> 10 == id_high) bin = id & 1023;
        }
        if (bin != no_bin) {
          float probability = __fdiv_rn(weights[id], total);
          one = (Packed(probability * 4398046511104.0f) << count_bits) | 1;
        }
      }
      int same;
      __match_all_sync(0xffffffffu, bin, &same);
      if (same && bin != no_bin) {  // equal logits in a warp: one addition instead of 32 that wait for each other
        for (int step = 16; step > 0; step /= 2) one += __shfl_down_sync(0xffffffffu, one, step);
        if (lane == 0) atomicAdd(&packed[bin], one);
      } else if (bin != no_bin) {
        atomicAdd(&packed[bin], one);
      }
    }
    __syncthreads();
    int bin = 2 * threadIdx.x;
    Packed first = packed[bin], second = packed[bin + 1], sum = first + second;
    for (int step = 1; step < 32; step *= 2) {
      Packed other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    Packed until = before + sum - first - second;
    for (int other = 0; other < warp; other++) until += warp_sums[other];
    if (first && keeps_next(until)) atomicMax(&found, bin);
    if (second && keeps_next(until + first)) atomicMax(&found, bin + 1);
    __syncthreads();
    if (found / 2 == threadIdx.x) {
      before_found = found % 2 ? until + first : until;
      size_found = packed[found];
    }
    __syncthreads();
    before = before_found;
    Packed size = size_found;
    if (level == 0) distance = found;
    else if (level == 1) order = uint32_t(found) << 21;
    else if (level == 2) order |= uint32_t(found) << 10;
    else if (level == 3) {
      order |= found;
      Packed num = size & count_mask, each = (size >> count_bits) / num;
      if (keeps_next(before + (((num - 1) * each) << count_bits) + num - 1)) break;
    }
    else if (level == 4) id_high = found;
    else last_id = id_high * 1024 + found;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    lowest[row] = __uint_as_float(order >> 31 ? order : ~order & 0x7fffffffu);
    last[row] = last_id;
  }
}
