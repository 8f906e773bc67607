// One token of each row of logits (N, V), and its log-probability after temperature; see token_draw.py. Both go to
// page-locked memory of the host, too, whose address comes in two halves.
// T type of the logits, VECTOR values that a thread may read at once.

struct alignas(sizeof(T) * VECTOR) Vector {
  T values[VECTOR];
};

extern "C" __global__ void __launch_bounds__(THREADS) token_draw(const T* logits, const float* temperatures,
#if DRAWS
                                                                 const float* uniforms,
#endif
#if GIVEN
                                                                 const int* given,
#endif
                                                                 int* tokens, int rows, int low, int high) {
  using Fixed = unsigned long long;
  constexpr unsigned all = 0xffffffffu;
  constexpr int each = 8, span = 32 * each, spans = (V + span - 1) / span, warps = THREADS / 32;
  constexpr int own = (spans + THREADS - 1) / THREADS;
  constexpr float one = 1099511627776.0f;  // 2^40: sums stay below 2^63
  __shared__ Fixed weights[spans], warp_sums[warps];
  __shared__ float warp_most[warps];
  __shared__ int warp_best[warps], is_broken;
  int64_t row = blockIdx.x;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* values = logits + row * V;
  float temperature = temperatures[row], scale = 1.0f / (temperature > 0.0f ? temperature : 1.0f);
  auto read = [&](int start, float* scaled) {
#pragma unroll
    for (int first = 0; first < each; first += VECTOR) {
      Vector part;
      int place = start + first;
#pragma unroll
      for (int i = 0; i < VECTOR; i++) part.values[i] = T(-INFINITY);
      if (place + VECTOR <= V) part = *reinterpret_cast<const Vector*>(values + place);
#pragma unroll
      for (int i = 0; i < VECTOR; i++) scaled[first + i] = float(part.values[i]) * scale;
    }
  };
  if (threadIdx.x == 0) is_broken = 0;

  // The largest, and the first that is as large
  float most = -INFINITY, scaled[each];
  int best = 0;
#pragma unroll 4
  for (int s = warp; s < spans; s += warps) {
    int start = s * span + lane * each;
    read(start, scaled);
#pragma unroll
    for (int i = 0; i < each; i++) {
      if (scaled[i] > most) {
        most = scaled[i];
        best = start + i;
      }
    }
  }
  auto merge = [&](float other, int place) {
    if (other > most || (other == most && place < best)) {
      most = other;
      best = place;
    }
  };
  for (int step = 16; step > 0; step /= 2)
    merge(__shfl_xor_sync(all, most, step), __shfl_xor_sync(all, best, step));
  if (lane == 0) {
    warp_most[warp] = most;
    warp_best[warp] = best;
  }
  __syncthreads();
  most = warp_most[0];
  best = warp_best[0];
  for (int other = 1; other < warps; other++) merge(warp_most[other], warp_best[other]);

  // Sums of exp(value - largest), of each span and then of all before it, as integers: no order rounds them
#pragma unroll 4
  for (int s = warp; s < spans; s += warps) {
    read(s * span + lane * each, scaled);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < each; i++) sum += expf(scaled[i] - most);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(all, sum, step);
    if (lane == 0) {
      weights[s] = Fixed(sum * one);
      if (!(sum < INFINITY)) is_broken = 1;  // NaN
    }
  }
  __syncthreads();
  auto sums_before = [&](Fixed mine) {  // of a warp's lanes
    Fixed until = mine;
    for (int step = 1; step < 32; step *= 2) {
      Fixed other = __shfl_up_sync(all, until, step);
      if (lane >= step) until += other;
    }
    return until - mine;
  };
  Fixed mine = 0;
  for (int i = 0; i < own; i++)
    if (threadIdx.x * own + i < spans) mine += weights[threadIdx.x * own + i];
  Fixed before = sums_before(mine), total = 0;
  if (lane == 31) warp_sums[warp] = before + mine;
  __syncthreads();
  for (int other = 0; other < warps; other++) {
    if (other < warp) before += warp_sums[other];
    total += warp_sums[other];
  }

#if DRAWS
  // The first span whose sum exceeds a share of the total, then the first of its tokens in the same way
  constexpr float fine = 1125899906842624.0f;  // 2^50: a span with a weight has a token with one
  __shared__ Fixed rest;
  __shared__ int chosen_span, chosen;
  auto share_of = [](Fixed sum, float uniform) {  // a multiple of 2^-24
    uint32_t share = uint32_t(uniform * 16777216.0f);
    return (sum >> 24) * share + (((sum & 0xffffff) * share) >> 24);
  };
  Fixed target = share_of(total, uniforms[2 * row]);
  for (int i = 0; i < own; i++) {
    int s = threadIdx.x * own + i;
    Fixed weight = s < spans ? weights[s] : 0;
    if (before <= target && target < before + weight) chosen_span = s;
    before += weight;
  }
  if (threadIdx.x == 0) {
    chosen = 0;
    if (total == 0) chosen_span = 0;
  }
  __syncthreads();
  if (temperature > 0.0f && warp == 0) {
    int start = chosen_span * span + lane * each;
    read(start, scaled);
    Fixed parts[each], sum = 0;
#pragma unroll
    for (int i = 0; i < each; i++) sum += parts[i] = Fixed(expf(scaled[i] - most) * fine);
    Fixed reached = sums_before(sum);
    if (lane == 31) rest = reached + sum;
    __syncwarp();
    target = share_of(rest, uniforms[2 * row + 1]);
#pragma unroll
    for (int i = 0; i < each; i++) {
      if (reached <= target && target < reached + parts[i]) chosen = start + i;
      reached += parts[i];
    }
    __syncwarp();
  }
#endif
  if (threadIdx.x == 0) {
    int token = best;
#if DRAWS
    if (temperature > 0.0f) token = chosen;
#endif
#if GIVEN
    token = given[row];
#endif
    float sum = is_broken ? __int_as_float(0x7fc00000) : float(double(total) / one);
    int* packed = reinterpret_cast<int*>(uint64_t(uint32_t(high)) << 32 | uint32_t(low));
    tokens[row] = token;
    packed[row] = token;
    packed[rows + row] = __float_as_int(float(values[token]) * scale - (most + logf(sum)));
  }
}
