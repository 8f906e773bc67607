// Waits until the word at the address that comes in two halves has reached `awaited`, in a circle of 32 bits. After POLLS
// looks, of a microsecond each, it gives up, and CUDA's context with it.

extern "C" __global__ void wait_until(int* done, int low, int high, int awaited) {
  const volatile int* counter = reinterpret_cast<const volatile int*>(uint64_t(uint32_t(high)) << 32 | uint32_t(low));
  for (int polls = 0; int(uint32_t(*counter) - uint32_t(awaited)) < 0; polls++) {
    if (polls == POLLS) __trap();
    __nanosleep(1000);
  }
  __threadfence();
  done[0] = 0;
}
