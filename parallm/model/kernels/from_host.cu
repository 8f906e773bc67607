// Numbers of 32 bits from page-locked memory of the host, whose address comes in two halves; see host_memory.py.

extern "C" __global__ void from_host(T* numbers, int count, int low, int high) {
  const volatile T* source = reinterpret_cast<const volatile T*>(uint64_t(uint32_t(high)) << 32 | uint32_t(low));
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) numbers[i] = source[i];
}
