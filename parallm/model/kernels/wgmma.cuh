// Products of 64 rows with 128 or 256 columns by a warpgroup of sm_90a, of matrices in shared memory. Rows of a matrix
// are 128 bytes, and eight of them begin at a multiple of 1024 bytes: vector v of row r is at place v ^ r % 8.
__device__ __forceinline__ uint64_t describe(unsigned start, unsigned leading, unsigned stride) {
  return uint64_t(start >> 4 & 0x3fff) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t(1) << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the newest `N` groups of products are done.
template <int N>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Lets products see what this thread has copied.
__device__ __forceinline__ void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#define FOUR(s, i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define SIXTEEN(s, i) FOUR(s, i), FOUR(s, i + 4), FOUR(s, i + 8), FOUR(s, i + 12)

// sums (64, 128 or 256) += A (64, 16) B, as `multiply` has them: A by rows; B^T by rows, or if FLIPPED B by rows of 64
// values, whose next 64 are `leading` bytes further.
template <typename T, bool FLIPPED>
struct Product;
#define PRODUCT(TYPE, NAME)                                                                                           \
  template <bool FLIPPED>                                                                                          \
  struct Product<TYPE, FLIPPED> {                                                                                  \
    static __device__ __forceinline__ void add(float (&sums)[64], uint64_t a, uint64_t b) {                           \
      asm volatile("{.reg .pred adds; setp.ne.b32 adds, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {"\
                   "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                           \
                   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                 \
                   "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                 \
                   "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                \
                   "%64, %65, adds, 1, 1, 0, %66;}"                                                                   \
                   : SIXTEEN(sums, 0), SIXTEEN(sums, 16), SIXTEEN(sums, 32), SIXTEEN(sums, 48)                        \
                   : "l"(a), "l"(b), "n"(FLIPPED));                                                                \
    }                                                                                                                 \
    static __device__ __forceinline__ void add(float (&sums)[128], uint64_t a, uint64_t b) {                          \
      asm volatile("{.reg .pred adds; setp.ne.b32 adds, 1, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." NAME "." NAME " {"\
                   "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                           \
                   "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                 \
                   "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                 \
                   "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                 \
                   "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                 \
                   "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                 \
                   "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "     \
                   "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "\
                   "%128, %129, adds, 1, 1, 0, %130;}"                                                                \
                   : SIXTEEN(sums, 0), SIXTEEN(sums, 16), SIXTEEN(sums, 32), SIXTEEN(sums, 48), SIXTEEN(sums, 64), SIXTEEN(sums, 80), SIXTEEN(sums, 96), SIXTEEN(sums, 112)\
                   : "l"(a), "l"(b), "n"(FLIPPED));                                                                \
    }                                                                                                                 \
  };
PRODUCT(__nv_bfloat16, "bf16")
PRODUCT(__half, "f16")
