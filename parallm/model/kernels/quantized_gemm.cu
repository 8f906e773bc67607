// Products of few rows with the weights of a quantized layer, which are unpacked in registers.
// Inputs `x` (B, T, I), `packed` (O, I / 8), numbers of 4 bits as MLX packs them, the lowest bits first, `scales` and
// `biases` (O, I / GROUP), if HAS_BIAS `bias` (O,). Output `y` (SPLITS, B, T, O): sums over parts of the input. If GATED
// `y` (B, T, O / 2) is SwiGLU of the outputs' halves, as in small_batch_gemm.cu.
// T type of all arrays, Y of the sums; TWO is a pair of T. WIDE warps side by side compute TALL times 16 outputs each,
// DEEP of them share each sum; TILES of 8 rows; CHUNK values of the input are fetched at once, STAGES such fetches are
// under way. SCALE_BYTES of a row's scales are fetched at once, for one chunk or several, into one of SLOTS places.
// As in small_batch_gemm.cu weights are the left factor, and which values of the input meet in one instruction does not
// matter as long as both sides agree. A lane has 4 words of a row at once, the numbers of 32 values, of one group. A
// word's numbers k and k + 4 are where a pair of T has its lowest bits, so pairs of the input are made of its values k
// and k + 4 as well.
// A pair is unpacked by as few instructions as its type allows. float16 has a MAGIC number whose 4 lowest bits are free:
// with its bits above, a number q is MAGIC + q, and MAGIC is taken off again. bfloat16, where MAGIC is 0, takes bits with
// nothing above, which are q x 2^-133, below the normal numbers, or q x 2^-129 four bits to the left.
// Scales, which are below 2^11, x 2^117 and x 2^113 bring both to q x scale x 2^-16 exactly, and sums are brought back.
#include "dependent.cuh"
#include "mma.cuh"

extern "C" __global__ void __launch_bounds__(32 * WIDE * DEEP, 1)
    quantized_gemm(const T* x, const uint32_t* packed, const T* scales, const T* biases,
#if HAS_BIAS
                   const T* bias,
#endif
                   Y* y, int rows, int width, int outputs, bool begins_early) {
  constexpr int HEIGHT = 16 * TALL * WIDE, THREADS = 32 * WIDE * DEEP, UNIT = 128;
  constexpr int VECTORS = CHUNK / 32, VECTORS_X = CHUNK / 8;     // of a row
  constexpr int AT_ONCE = THREADS / VECTORS, AT_ONCE_X = THREADS / VECTORS_X;  // rows that a vector each is fetched of
  static_assert(THREADS % VECTORS_X == 0 && AT_ONCE % 2 == 0, "a thread always has the same vector of a row");
  constexpr int PITCH = CHUNK / 2 + 32, PITCH_X = CHUNK * 2;  // of weights: a quarter of a warp reads from all banks
  constexpr int STAGE = HEIGHT * PITCH + TILES * 8 * PITCH_X;
  constexpr int IN_CHUNK = CHUNK / GROUP, OF_VECTOR = SCALE_BYTES / 2;  // groups
  constexpr int SPAN = OF_VECTOR > IN_CHUNK ? OF_VECTOR / IN_CHUNK : 1;  // chunks that share a fetch of scales
  constexpr int GROUPS = SPAN * IN_CHUNK, PARTS = GROUPS / OF_VECTOR, SLOT = HEIGHT * GROUPS * 2;
  static_assert(GROUP % 32 == 0 && CHUNK % GROUP == 0, "a lane's 32 values are of one group");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  const int across = warp % WIDE, along = warp / WIDE;
  const int blocks = (outputs + HEIGHT - 1) / HEIGHT;
  const int first = blockIdx.x % blocks * HEIGHT, part = blockIdx.x / blocks;
  const int chunks = (width + CHUNK - 1) / CHUNK, all_groups = width / GROUP;
  const int begin = chunks * part / SPLITS, end = chunks * (part + 1) / SPLITS;
  auto output_of = [&](int row) { return GATED ? row / 2 + row % 2 * (outputs / 2) : row; };

  extern __shared__ __align__(128) char shared[];
  char* const given_scales = shared + STAGES * STAGE;
  const unsigned start = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int line = threadIdx.x / VECTORS, line_x = threadIdx.x / VECTORS_X;
  const int vector = threadIdx.x % VECTORS, vector_x = threadIdx.x % VECTORS_X;
  // A row of the input lies in lines of 8 vectors, as it comes: copies that mixed lines made products of 32 rows take up
  // to twice as long. The order within a line depends on one bit of the line and one of the row, so that here, too, a
  // quarter of a warp reads from all banks.
  auto place_of = [](int row, int vector) { return (row * VECTORS_X + vector) ^ (row % 2 * 2 + vector / 8 % 2); };
  const int own_packed = output_of(first + line) * (width / 8) + vector * 4;
  const int own_x = line_x * width + vector_x * 8;
  auto fetch = [&](int chunk, int stage, bool has_weights, bool has_rows) {
    if (chunk < end) {
      const unsigned to = start + stage * STAGE;
      if (has_weights && chunk * CHUNK + vector * 32 < width)
#pragma unroll
        for (int i = 0; i < HEIGHT; i += AT_ONCE)
          if (line + i < HEIGHT && first + line + i < outputs)
            copy_async(to + (line + i) * PITCH + vector * 16,
                       packed + own_packed + chunk * (CHUNK / 8) + (GATED ? i / 2 : i) * (width / 8));
      if (has_rows && chunk * CHUNK + vector_x * 8 < width)
#pragma unroll
        for (int i = 0; i < TILES * 8; i += AT_ONCE_X)
          if (line_x + i < min(TILES * 8, rows))
            copy_async(to + HEIGHT * PITCH + place_of(line_x + i, vector_x) * 16, x + own_x + chunk * CHUNK + i * width);
      if (has_weights && (chunk % SPAN == 0 || chunk == begin)) {
        const unsigned to_scales = start + STAGES * STAGE + chunk / SPAN % SLOTS * 2 * SLOT;
#pragma unroll
        for (int i = threadIdx.x; i < HEIGHT * PARTS; i += THREADS) {
          const int row = i / PARTS, at = chunk / SPAN * GROUPS + i % PARTS * OF_VECTOR;
          if (first + row >= outputs || at >= all_groups) continue;
          const int from = output_of(first + row) * all_groups + at;
          copy_few<SCALE_BYTES>(to_scales + i * SCALE_BYTES, scales + from);
          copy_few<SCALE_BYTES>(to_scales + SLOT + i * SCALE_BYTES, biases + from);
        }
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  int own_given[4];  // of a word's values
#pragma unroll
  for (int w = 0; w < 4; w++) own_given[w] = HEIGHT * PITCH + place_of(group, quad * 4 + w) * 16;
  float sum[TALL][TILES][4] = {};
#if MAGIC
  const TWO magic{T(float(MAGIC)), T(float(MAGIC))};
  const uint32_t above = reinterpret_cast<const uint32_t&>(magic);
#endif
  int stage = 0;  // of the chunk that is fetched
#pragma unroll 1
  for (int step = (1 - STAGES) * (1 + begins_early); step < end - begin; step++) {
    // As in small_batch_gemm.cu: perhaps first weights, which no kernel writes, and then rows
    const bool has_rows = step > -STAGES;
    if (step == 1 - STAGES) {
      wait_for_inputs();
      stage = 0;
    }
    if (step >= 0) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
      __syncthreads();
    }
    fetch(begin + step + (has_rows ? 1 : 2) * (STAGES - 1), stage, !begins_early || !has_rows || step >= 0, has_rows);
    stage = stage == STAGES - 1 ? 0 : stage + 1;  // and of the one that is multiplied
    if (step < 0) continue;
    const int chunk = begin + step;
    const int row = across * 16 * TALL + group * 2;
    const char* weights = shared + stage * STAGE + row * PITCH + quad * 16;
    const T* own_scales =
        reinterpret_cast<const T*>(given_scales + chunk / SPAN % SLOTS * 2 * SLOT) + row * GROUPS;
    const int units = (width - chunk * CHUNK) / UNIT;
#pragma unroll 1
    for (int unit = along; unit < CHUNK / UNIT; unit += DEEP) {
      if (unit >= units) break;
      const int place = chunk % SPAN * IN_CHUNK + (unit * UNIT + quad * 32) / GROUP;
      uint4 words[TALL][2];
      TWO scale[TALL][2][2], offset[TALL][2];  // of a row's even and odd numbers
#pragma unroll
      for (int t = 0; t < TALL; t++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
          words[t][odd] = *reinterpret_cast<const uint4*>(weights + (t * 16 + odd) * PITCH + unit * 64);
          const T* of_row = own_scales + (t * 16 + odd) * GROUPS + place;
          const TWO both{of_row[0], of_row[0]}, biases{of_row[SLOT / 2], of_row[SLOT / 2]};
#if MAGIC
          scale[t][odd][0] = scale[t][odd][1] = both;
          offset[t][odd] = biases;
#else
          scale[t][odd][0] = __hmul2(both, TWO{T(0x1p117f), T(0x1p117f)});
          scale[t][odd][1] = __hmul2(both, TWO{T(0x1p113f), T(0x1p113f)});
          offset[t][odd] = __hmul2(biases, TWO{T(0x1p-16f), T(0x1p-16f)});
#endif
        }
#pragma unroll
      for (int w = 0; w < 4; w++) {
        uint32_t pairs[TALL][2][4];
#pragma unroll
        for (int t = 0; t < TALL; t++)
#pragma unroll
          for (int odd = 0; odd < 2; odd++) {
            const uint4& all = words[t][odd];
            const uint32_t word = w == 0 ? all.x : w == 1 ? all.y : w == 2 ? all.z : all.w;
#pragma unroll
            for (int k = 0; k < 4; k++) {
#if MAGIC
              const uint32_t bits = word >> 4 * k & 0x000f000fu | above;
              const TWO numbers = __hsub2(reinterpret_cast<const TWO&>(bits), magic);
#else
              const uint32_t bits = word >> k / 2 * 8 & (k % 2 ? 0x00f000f0u : 0x000f000fu);
              const TWO numbers = reinterpret_cast<const TWO&>(bits);
#endif
              const TWO values = __hfma2(numbers, scale[t][odd][k % 2], offset[t][odd]);
              pairs[t][odd][k] = reinterpret_cast<const uint32_t&>(values);
            }
          }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
          const uint4 of_row =
              *reinterpret_cast<const uint4*>(shared + stage * STAGE + own_given[w] + n * 8 * PITCH_X + unit * 256);
          const uint32_t pair0 = __byte_perm(of_row.x, of_row.z, 0x5410), pair1 = __byte_perm(of_row.x, of_row.z, 0x7632);
          const uint32_t pair2 = __byte_perm(of_row.y, of_row.w, 0x5410), pair3 = __byte_perm(of_row.y, of_row.w, 0x7632);
#pragma unroll
          for (int t = 0; t < TALL; t++) {
            auto& even = pairs[t][0];
            auto& odd = pairs[t][1];
            multiply<T>(sum[t][n], even[0], odd[0], even[1], odd[1], pair0, pair1);
            multiply<T>(sum[t][n], even[2], odd[2], even[3], odd[3], pair2, pair3);
          }
        }
      }
    }
  }
  if (DEEP > 1) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    float4* sums = reinterpret_cast<float4*>(shared) + across * TALL * TILES * 32 + lane;
    if (along > 0) {
#pragma unroll
      for (int i = 0; i < TALL * TILES; i++) {
        const float* of = sum[i / TILES][i % TILES];
        sums[((along - 1) * WIDE * TALL * TILES + i) * 32] = make_float4(of[0], of[1], of[2], of[3]);
      }
    }
    __syncthreads();
    if (along > 0) return;
#pragma unroll 1
    for (int other = 0; other < DEEP - 1; other++)
#pragma unroll
      for (int i = 0; i < TALL * TILES; i++) {
        const float4 added = sums[(other * WIDE * TALL * TILES + i) * 32];
        float* of = sum[i / TILES][i % TILES];
        of[0] += added.x;
        of[1] += added.y;
        of[2] += added.z;
        of[3] += added.w;
      }
  }
  constexpr float UP = MAGIC ? 1.0f : 0x1p16f;
  struct alignas(2 * sizeof(Y)) Pair {
    Y values[2];
  };
#pragma unroll
  for (int t = 0; t < TALL; t++) {
    const int output = first + (across * TALL + t) * 16 + group * 2;  // this one and the next
    if (output >= outputs) return;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int row = n * 8 + quad * 2 + odd;
        if (row >= rows) continue;
        const int at = part * rows + row;
        float of_even = sum[t][n][odd] * UP, of_odd = sum[t][n][2 + odd] * UP;
#if HAS_BIAS
        if (part == 0) {
          of_even += float(bias[GATED ? output / 2 : output]);
          of_odd += float(bias[GATED ? (output + outputs) / 2 : output + 1]);
        }
#endif
#if GATED
        const float gate = float(Y(of_even));
        y[at * (outputs / 2) + output / 2] = Y(gate / (1.0f + __expf(-gate)) * float(Y(of_odd)));
#else
        *reinterpret_cast<Pair*>(y + at * outputs + output) = Pair{Y(of_even), Y(of_odd)};
#endif
      }
  }
}
