// Products of 16 by 16 values with 16 by 8 on tensor cores, and copies that do not wait.
template <typename T>
__device__ __forceinline__ void multiply(float* sum, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                         unsigned b1);
#define MULTIPLY(TYPE, NAME)                                                                                        \
  template <>                                                                                                       \
  __device__ __forceinline__ void multiply<TYPE>(float* sum, unsigned a0, unsigned a1, unsigned a2, unsigned a3,    \
                                                 unsigned b0, unsigned b1) {                                        \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                             \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                             \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                           \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                           \
  }
MULTIPLY(__nv_bfloat16, "bf16")
MULTIPLY(__half, "f16")

__device__ __forceinline__ void copy_async(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// 4, 8 or 16 bytes
template <int BYTES>
__device__ __forceinline__ void copy_few(unsigned to, const void* from) {
  if (BYTES == 16)
    copy_async(to, from);
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
