// One token of the gated delta rule for each row; see gated_delta_step.py.
// A block takes a row's value head. LANES threads share a row of the state, of which each holds DK / LANES values, and
// AT_ONCE such rows. With v the row's value, g its gate and u = beta (v - S' k), where S' = g S:
//   S <- S' + u k^T        o = S q = S' q + u (k . q)
// Inputs: q, k (B, HK, DK), v (B, HK * J, DV), a and b from `start` on and `pitch` from row to row, a_log and dt_bias of
// a head, or BY_CHANNEL dt_bias and a of its DK channels; `state` (B, HK * J, DV, DK). Outputs: `output` (B, HK * J, DV)
// and `next`, the state after the token.
// T, A, B, L, D types. NORMALIZED: q and k become unit_q and unit_k times their RMS norm. BOUNDED: log g is
// bound * sigmoid(exp(a_log) (a + dt_bias)), or else -exp(a_log) softplus(a + dt_bias). TWICE: beta is up to 2.
// GATED: the output of a head is its RMS norm, times `weight` (DV) and silu of `z`.
#include "pack.cuh"

__device__ __forceinline__ float of_lanes(float value) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

extern "C" __global__ void __launch_bounds__(THREADS) gated_delta_step(
    const T* q, const T* k, const T* v, const A* a, const B* b, const L* a_log, const D* dt_bias, const float* state,
#if GATED
    const T* z, const T* weight,
#endif
    T* output, float* next, int q_start, int q_pitch, int k_start, int k_pitch, int v_start, int v_pitch, int a_start,
    int a_pitch, int b_start, int b_pitch,
#if GATED
    int z_start, int z_pitch, float eps,
#endif
    float bound, float unit_eps, float unit_q, float unit_k) {
  constexpr int CHUNKS = DK / LANES / 4, ROWS = THREADS / LANES, HEADS = HK * J;
  struct alignas(4 * sizeof(T)) Four {
    T values[4];
  };
  const int64_t row = blockIdx.x / HEADS;
  const int head = blockIdx.x % HEADS, lane = threadIdx.x % LANES;

  // The keys and queries of this thread's channels: 4 of them, then 4 that are 4 LANES later, and so on
  float query[CHUNKS * 4], key[CHUNKS * 4];
  const Four* queries = reinterpret_cast<const Four*>(q + q_start + row * q_pitch + head / J * DK);
  const Four* keys = reinterpret_cast<const Four*>(k + k_start + row * k_pitch + head / J * DK);
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const Four one = queries[i * LANES + lane], other = keys[i * LANES + lane];
#pragma unroll
    for (int j = 0; j < 4; j++) query[i * 4 + j] = float(one.values[j]), key[i * 4 + j] = float(other.values[j]);
  }
#if NORMALIZED
  float of_query = 0.0f, of_key = 0.0f;
#pragma unroll
  for (int i = 0; i < CHUNKS * 4; i++) of_query += query[i] * query[i], of_key += key[i] * key[i];
  of_query = rsqrtf(of_lanes(of_query) / DK + unit_eps), of_key = rsqrtf(of_lanes(of_key) / DK + unit_eps);
  const float scale_q = float(T(unit_q)), scale_k = float(T(unit_k));
#pragma unroll
  for (int i = 0; i < CHUNKS * 4; i++) {
    query[i] = float(T(scale_q * float(T(query[i] * of_query))));
    key[i] = float(T(scale_k * float(T(key[i] * of_key))));
  }
#endif
  float product = 0.0f;
#pragma unroll
  for (int i = 0; i < CHUNKS * 4; i++) product += key[i] * query[i];
  product = of_lanes(product);

  // Gates
  const float rate = expf(float(a_log[head]));
  auto gate_of = [&](int place) {
    const float shifted = float(a[a_start + row * a_pitch + place]) + float(dt_bias[place]);
#if BOUNDED
    return expf(bound * sigmoid(rate * shifted));
#else
    return expf(-rate * (fmaxf(shifted, 0.0f) + log1pf(expf(-fabsf(shifted)))));
#endif
  };
#if BY_CHANNEL
  float gates[CHUNKS * 4];
#pragma unroll
  for (int i = 0; i < CHUNKS * 4; i++) gates[i] = gate_of(head * DK + (i / 4 * LANES + lane) * 4 + i % 4);
#else
  const float gate = gate_of(head);
#endif
  float beta = float(B(sigmoid(float(b[b_start + row * b_pitch + head]))));
#if TWICE
  beta *= 2.0f;
#endif

  // The state, AT_ONCE rows of each LANES threads
  const T* values = v + v_start + row * v_pitch + head * DV;
  const int64_t first = int64_t(blockIdx.x) * DV * DK;
#if GATED
  __shared__ float outputs[DV];
#endif
  for (int start = threadIdx.x / LANES; start < DV + threadIdx.x / LANES; start += ROWS * AT_ONCE) {
    float part[AT_ONCE][CHUNKS * 4];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      const int line = start + n * ROWS;
      const float4* from = reinterpret_cast<const float4*>(state + first + line * DK);
#pragma unroll
      for (int i = 0; i < CHUNKS; i++) {
        const float4 four = line < DV ? from[i * LANES + lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        part[n][i * 4] = four.x, part[n][i * 4 + 1] = four.y, part[n][i * 4 + 2] = four.z, part[n][i * 4 + 3] = four.w;
      }
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      const int line = start + n * ROWS;
      float read = 0.0f, seen = 0.0f;
#pragma unroll
      for (int i = 0; i < CHUNKS * 4; i++) {
#if BY_CHANNEL
        part[n][i] *= gates[i];
#else
        part[n][i] *= gate;
#endif
        read += part[n][i] * key[i], seen += part[n][i] * query[i];
      }
      read = of_lanes(read), seen = of_lanes(seen);
      if (line >= DV) continue;
      const float written = (float(values[line]) - read) * beta;
      float4* to = reinterpret_cast<float4*>(next + first + line * DK);
#pragma unroll
      for (int i = 0; i < CHUNKS; i++)
        to[i * LANES + lane] = make_float4(
            part[n][i * 4] + written * key[i * 4], part[n][i * 4 + 1] + written * key[i * 4 + 1],
            part[n][i * 4 + 2] + written * key[i * 4 + 2], part[n][i * 4 + 3] + written * key[i * 4 + 3]);
      if (lane == 0) {
        const T rounded = T(seen + written * product);
#if GATED
        outputs[line] = float(rounded);
#else
        output[int64_t(blockIdx.x) * DV + line] = rounded;
#endif
      }
    }
  }
#if GATED
  __shared__ float of_warp[THREADS / 32];
  __syncthreads();
  const int place = threadIdx.x;
  float squares = place < DV ? outputs[place] * outputs[place] : 0.0f;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.0f;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; warp++) squares += of_warp[warp];
  if (place < DV) {
    const float normed = float(T(float(weight[place]) * float(T(outputs[place] * rsqrtf(squares / DV + eps)))));
    const float open = float(z[z_start + row * z_pitch + head * DV + place]);
    output[int64_t(blockIdx.x) * DV + place] = T(open * sigmoid(open) * normed);
  }
#endif
}
