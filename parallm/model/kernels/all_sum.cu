// The sum of an array over all ranks, each of which writes its own array into the memory of the others; see all_sum.py.
// Inputs `y` (N), and `memory`: the address of each rank's part, as this rank sees it. Output `sums` (N).
// A part holds WORDS of 16 bytes for each turn (two of them), rank and thread, then a count of calls for each block.
// T type of `y` and `sums`, RANKS, RANK own number, BLOCKS that a part has room for, THREADS of a block.
// A word carries half as many bytes as it has, and the number of the call beside each: whoever reads that number has the
// bytes before it, so there are no barriers (as NCCL's LL protocol). A word is written again two calls later. By then its
// reader has ended the call: its own word of the call between, which this thread has waited for, came after that.
#include "pack.cuh"

extern "C" __global__ void all_sum(const T* y, const uint64_t* memory, T* sums, int size) {
  struct alignas(8) Half {
    T values[8 / sizeof(T)];
  };
  constexpr int values = 8 / sizeof(T);
  constexpr int64_t words = int64_t(BLOCKS) * THREADS;  // of a rank in a turn
  uint32_t* calls = reinterpret_cast<uint32_t*>(memory[RANK] + 2 * RANKS * words * 16) + blockIdx.x;
  const uint32_t call = *reinterpret_cast<volatile uint32_t*>(calls) + 1;
  __syncthreads();
  if (threadIdx.x == 0) *reinterpret_cast<volatile uint32_t*>(calls) = call;
  const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (index * values >= size) return;
  const int64_t turn = int64_t(call & 1) * RANKS;
  union {
    Half half;
    uint32_t bits[2];
  } given[RANKS];
  given[RANK].half = reinterpret_cast<const Half*>(y)[index];
#pragma unroll
  for (int step = 1; step < RANKS; step++) {  // each rank begins with another one
    const uint64_t word = memory[(RANK + step) % RANKS] + ((turn + RANK) * words + index) * 16;
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(word), "r"(given[RANK].bits[0]), "r"(call),
                 "r"(given[RANK].bits[1])
                 : "memory");
  }
#pragma unroll
  for (int step = 1; step < RANKS; step++) {
    const int rank = (RANK + step) % RANKS;
    const uint64_t word = memory[RANK] + ((turn + rank) * words + index) * 16;
    uint32_t first, second;
    do {
      asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(given[rank].bits[0]), "=r"(first), "=r"(given[rank].bits[1]), "=r"(second)
                   : "l"(word)
                   : "memory");
    } while (first != call || second != call);
  }
  Half total;
#pragma unroll
  for (int j = 0; j < values; j++) {
    float sum = float(given[0].half.values[j]);  // in the order of ranks, so that all have the same bits
#pragma unroll
    for (int rank = 1; rank < RANKS; rank++) sum += float(given[rank].half.values[j]);
    total.values[j] = T(sum);
  }
  reinterpret_cast<Half*>(sums)[index] = total;
}
