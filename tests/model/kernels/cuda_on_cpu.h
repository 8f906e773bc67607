// Runs a kernel's own source on a CPU: each thread of a block is a fiber, and fibers take turns at random where they wait.
// Copies to shared memory happen when they are waited for, and not before; what has not arrived is NaN.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
using std::max;
using std::min;
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define CHECK(condition)                                                                     \
  if (!(condition)) {                                                                        \
    std::fprintf(stderr, "%s: block %d, thread %d\n", #condition, blockIdx.x, threadIdx.x); \
    std::abort();                                                                            \
  }

#define __cvta_generic_to_shared(pointer) address_of(pointer)
#define __expf expf
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

struct Size3 {
  int x, y;
};
extern Size3 threadIdx, blockIdx, blockDim, gridDim;
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float from) : value(from) {}
  explicit operator float() const { return value; }
};
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float from) {  // rounded to even; all NaN are one
    uint32_t all;
    std::memcpy(&all, &from, 4);
    bits = from != from ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16;
  }
  explicit operator float() const {
    const uint32_t all = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &all, 4);
    return value;
  }
};
template <typename T>
struct alignas(4) PairOf {
  T x, y;
};
typedef PairOf<__half> __half2;
typedef PairOf<__nv_bfloat16> __nv_bfloat162;
template <typename T>
PairOf<T> __hsub2(PairOf<T> a, PairOf<T> b) {
  return {T(float(a.x) - float(b.x)), T(float(a.y) - float(b.y))};
}
template <typename T>
PairOf<T> __hmul2(PairOf<T> a, PairOf<T> b) {
  return {T(float(a.x) * float(b.x)), T(float(a.y) * float(b.y))};
}
template <typename T>
PairOf<T> __hfma2(PairOf<T> a, PairOf<T> b, PairOf<T> c) {
  return {T(float(a.x) * float(b.x) + float(c.x)), T(float(a.y) * float(b.y) + float(c.y))};
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selectors) {
  const uint64_t both = uint64_t(high) << 32 | low;
  unsigned found = 0;
  for (int i = 0; i < 4; i++) found |= unsigned(both >> (selectors >> 4 * i & 7) * 8 & 255) << 8 * i;
  return found;
}

// Numbers of xorshift (https://www.jstatsoft.org/article/view/v008i14); <random> takes as long to compile as a kernel
struct Random {
  uint64_t state;
  void seed(int number) { state = uint64_t(number) * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du; }
  unsigned operator()() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state >> 32;
  }
};
extern Random random_numbers;

constexpr int MAX_THREADS = 1024;
extern int num_threads;
void switch_from(int self);
void wait_while(const int& at, int value);

struct Barrier {
  int arrived = 0, generation = 0;
  void wait(int count) {
    const int own = generation;
    if (++arrived == count) {
      arrived = 0;
      generation++;
    }
    wait_while(generation, own);
  }
};
extern Barrier block_barrier, warp_barriers[MAX_THREADS / 32];

inline void __syncthreads() { block_barrier.wait(num_threads); }
inline void __syncwarp() { warp_barriers[threadIdx.x / 32].wait(32); }
inline void __threadfence() {}
inline void wait_for_inputs() {}
inline void __nanosleep(unsigned) {}
[[noreturn]] void __trap();

// `result(of)` in each lane, where `of(lane)` is the value that this lane has given
template <typename Value, typename Result>
auto exchange(const Value& own, Result result) {
  static Value values[MAX_THREADS];
  const int warp = threadIdx.x / 32;
  values[threadIdx.x] = own;
  __syncwarp();
  auto found = result([warp](int lane) { return values[warp * 32 + lane]; });
  __syncwarp();
  return found;
}
// internal, here and below, as ranks have lanes of their own
template <typename Value>
static Value __shfl_xor_sync(unsigned, Value own, int mask) {
  const int lane = threadIdx.x % 32;
  return exchange(own, [=](auto of) { return of(lane ^ mask); });
}
template <typename Value>
static Value __shfl_up_sync(unsigned, Value own, int step) {
  const int lane = threadIdx.x % 32;
  return exchange(own, [=](auto of) { return of(lane < step ? lane : lane - step); });
}
inline int atomicAdd(int* at, int more) { return (*at += more) - more; }
inline unsigned atomicInc(unsigned* at, unsigned limit) {
  const unsigned old = *at;
  *at = old >= limit ? 0 : old + 1;
  return old;
}
template <typename Value>
Value __ldcg(const Value* at) { return *at; }
inline float __int_as_float(int bits) { return reinterpret_cast<float&>(bits); }
inline int __float_as_int(float x) { return reinterpret_cast<int&>(x); }
inline float __uint_as_float(unsigned bits) { return reinterpret_cast<float&>(bits); }
inline unsigned __float_as_uint(float x) { return reinterpret_cast<unsigned&>(x); }

// Shared memory
constexpr unsigned MAX_SHARED = 227 * 1024;
extern char shared_memory[MAX_SHARED];
extern unsigned num_shared;
inline unsigned address_of(const void* at) {
  const int64_t address = static_cast<const char*>(at) - shared_memory;
  CHECK(address >= 0 && address < num_shared);
  return address;
}
// What copies have brought stays hidden from products of warpgroups until `show_copies`.
extern std::vector<std::pair<unsigned, int>> unshown[MAX_THREADS];
extern bool is_hidden[MAX_SHARED / 4];
inline void set_hidden(unsigned at, int bytes, bool hidden) { std::fill_n(is_hidden + at / 4, bytes / 4, hidden); }

struct Copy {
  unsigned to;
  const void* from;
  int bytes;
  bool valid;
};
extern std::vector<std::vector<Copy>> copies[MAX_THREADS];  // the last group of a thread is open
template <int BYTES>
void copy_few(unsigned to, const void* from, bool valid = true) {
  CHECK(to % BYTES == 0 && to + BYTES <= num_shared && uintptr_t(from) % BYTES == 0);
  std::memset(shared_memory + to, 0xff, BYTES);
  copies[threadIdx.x].back().push_back({to, from, BYTES, valid});
}
inline void copy_vector(unsigned to, const void* from, bool valid) { copy_few<16>(to, from, valid); }
inline void copy_async(unsigned to, const void* from) { copy_vector(to, from, true); }
inline void commit_copies() { copies[threadIdx.x].emplace_back(); }
template <int N>
void wait_copies() {
  auto& groups = copies[threadIdx.x];
  for (; groups.size() > N + 1; groups.erase(groups.begin()))
    for (const Copy& copy : groups.front()) {
      if (copy.valid)
        std::memcpy(shared_memory + copy.to, copy.from, copy.bytes);
      else
        std::memset(shared_memory + copy.to, 0, copy.bytes);
      unshown[threadIdx.x].emplace_back(copy.to, copy.bytes);
      set_hidden(copy.to, copy.bytes, true);
    }
}

// Tensor cores: PTX, "Warp Level Matrix Instructions"
struct Four {
  unsigned values[4];
};
static void load_matrices(unsigned (&to)[4], unsigned from) {
  const int lane = threadIdx.x % 32;
  CHECK(from % 16 == 0);
  const Four found = exchange(from, [=](auto of) {
    Four found;
    for (int i = 0; i < 4; i++) std::memcpy(found.values + i, shared_memory + of(i * 8 + lane / 4) + lane % 4 * 4, 4);
    return found;
  });
  std::copy_n(found.values, 4, to);
}
static void load_transposed(unsigned (&to)[4], unsigned from) {
  const int lane = threadIdx.x % 32;
  CHECK(from % 16 == 0);
  const Four found = exchange(from, [=](auto of) {
    Four found;
    for (int i = 0; i < 4; i++) {
      uint16_t pair[2];
      for (int j = 0; j < 2; j++) std::memcpy(pair + j, shared_memory + of(i * 8 + lane % 4 * 2 + j) + lane / 4 * 2, 2);
      std::memcpy(found.values + i, pair, 4);
    }
    return found;
  });
  std::copy_n(found.values, 4, to);
}
inline float exp2_of(float x) { return exp2f(x); }
template <typename Half>
unsigned packed(Half, float low, float high) {
  const Half pair[2] = {Half(low), Half(high)};
  unsigned both;
  std::memcpy(&both, pair, 4);
  return both;
}
template <typename Half>
static void multiply(float* sum, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  struct Operands {
    Half a[4][2], b[2][2];
  } own;
  const unsigned all[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(&own, all, sizeof(own));
  struct Sums {
    float values[4] = {};
  };
  const int lane = threadIdx.x % 32;
  const Sums found = exchange(own, [=](auto of) {
    Sums found;
    for (int e = 0; e < 4; e++)
      for (int k = 0; k < 16; k++)
        found.values[e] += float(of(lane / 4 * 4 + k % 8 / 2).a[e / 2 + k / 8 * 2][k % 2]) *
                           float(of((lane % 4 * 2 + e % 2) * 4 + k % 8 / 2).b[k / 8][k % 2]);
    return found;
  });
  for (int e = 0; e < 4; e++) sum[e] += found.values[e];
}

static void multiply_tf32(float* sum, const unsigned (&a)[4], const unsigned (&b)[2]) {
  struct Operands {
    float a[4], b[2];
  } own;
  for (int i = 0; i < 4; i++) own.a[i] = __uint_as_float(a[i] & ~0x1fffu);  // the last bits are not read
  for (int i = 0; i < 2; i++) own.b[i] = __uint_as_float(b[i] & ~0x1fffu);
  struct Sums {
    float values[4] = {};
  };
  const int lane = threadIdx.x % 32;
  const Sums found = exchange(own, [=](auto of) {
    Sums found;
    for (int e = 0; e < 4; e++)
      for (int k = 0; k < 8; k++)
        found.values[e] += of(lane / 4 * 4 + k % 4).a[e / 2 + k / 4 * 2] * of((lane % 4 * 2 + e % 2) * 4 + k % 4).b[k / 4];
    return found;
  });
  for (int e = 0; e < 4; e++) sum[e] += found.values[e];
}
// Memory of several ranks, each of which runs in a thread of its own; quarters of a word arrive by themselves
void store_word(uint64_t address, const uint32_t (&quarters)[4]);
void load_word(uint64_t address, uint32_t (&quarters)[4]);

extern void (*begin_warpgroups)();  // of warpgroups_on_cpu.h, where a kernel needs it: a third of the time to compile

// Blocks one after the other, in a random order; whether all have ended
bool launch(int blocks, int rows_of_blocks, int threads, unsigned shared, int seed, void (*kernel)());
