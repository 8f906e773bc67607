// Products of a warpgroup of sm_90a, 128 threads with 64 rows, and barriers between warps: PTX, "Asynchronous Warpgroup
// Level Matrix Instructions" and "mbarrier". Rows of a matrix in shared memory are 128 bytes, and eight of them begin
// at a multiple of 1024 bytes: vector v of row r is at place v ^ r % 8.
// A matrix for a product: `stride` bytes between eight rows and the next, `leading` ones between 64 columns and the
// next.
__device__ __forceinline__ uint64_t describe(unsigned start, unsigned leading, unsigned stride) {
  return uint64_t(start >> 4 & 0x3fff) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t(1) << 62;
}

// Operands that threads have changed are seen by the products that follow.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the newest `N` groups of products are done.
template <int N>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving what reads or writes the operands of products across this place.
template <int N>
__device__ __forceinline__ void hold(float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void hold(unsigned (&values)[COUNT][4]) {
#pragma unroll
  for (int i = 0; i < 4 * COUNT; i++) asm volatile("" : "+r"(values[i / 4][i % 4])::"memory");
}
// Lets products see what this thread has written to shared memory, copies that have arrived included.
__device__ __forceinline__ void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void init_barrier(unsigned at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(unsigned at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
// Waits for the end of the phase of this parity; the first one's is 0.
__device__ __forceinline__ void wait_barrier(unsigned at, int parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ended;\n"
      "bra again;\n"
      "ended:}" ::"r"(at),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void sync_group(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}
// Moves registers between warpgroups: what some give, others take.
template <int N>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

#define FOUR(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define SIXTEEN(s, i) FOUR(s, i), FOUR(s, i + 4), FOUR(s, i + 8), FOUR(s, i + 12)
#define SUMS_OF_64 SIXTEEN(sums, 0), SIXTEEN(sums, 16)
#define SUMS_OF_128 SUMS_OF_64, SIXTEEN(sums, 32), SIXTEEN(sums, 48)
#define NAMES_OF_64                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_OF_128                                                                  \
  NAMES_OF_64                                                                         \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Sums of 64 rows and COLUMNS columns: of row r and the next eight, threads hold what `multiply` in mma.cuh gives them.
// add_rows: A (64, 16) B^T, both by rows in shared memory; the sums before count if `adds`.
// add_columns: A (64, 16), held as `multiply` takes it, times B (16, COLUMNS), by rows in shared memory.
template <typename T>
struct Products;
#define PRODUCTS_OF(COLUMNS, NAME, A, B, C, D, E)                                                                   \
  static __device__ __forceinline__ void add_rows(float (&sums)[COLUMNS / 2], uint64_t a, uint64_t b, bool adds) { \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %" C ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS        \
                 "k16.f32." NAME "." NAME " " NAMES_OF_##COLUMNS "}, %" A ", %" B ", adds, 1, 1, 0, 0;}"            \
                 : SUMS_OF_##COLUMNS                                                                                \
                 : "l"(a), "l"(b), "r"(int(adds)));                                                                 \
  }                                                                                                                 \
  static __device__ __forceinline__ void add_columns(float (&sums)[COLUMNS / 2], const unsigned (&a)[4],            \
                                                     uint64_t b) {                                                  \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, 1, 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS             \
                 "k16.f32." NAME "." NAME " " NAMES_OF_##COLUMNS "}, {%" A ", %" B ", %" C ", %" D "}, %" E         \
                 ", adds, 1, 1, 1;}"                                                                                \
                 : SUMS_OF_##COLUMNS                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
  }
#define PRODUCTS(TYPE, NAME)                              \
  template <>                                             \
  struct Products<TYPE> {                                 \
    PRODUCTS_OF(64, NAME, "32", "33", "34", "35", "36")   \
    PRODUCTS_OF(128, NAME, "64", "65", "66", "67", "68")  \
  };
PRODUCTS(__nv_bfloat16, "bf16")
PRODUCTS(__half, "f16")
