// Sums over all ranks, each of which writes its own vectors into the memory of the others.
// `memory` holds the address of each rank's part, as this rank sees it. A part has two words for each turn (two of
// them), rank and vector, then a count of calls for each warp's vectors, whichever kernel sums them.
// RANKS, RANK own number, VECTORS that a part has room for.
// Whoever reads the number of the call in a word has the bytes beside it, so there are no barriers (as NCCL's LL
// protocol). A word is written again two calls later. By then its reader has ended the call: its own word of the call
// between, which a thread here has waited for, came after that, since a rank's kernels run one after the other.

// The number of this call for the vectors of this warp, which begin at a multiple of 32; for whole warps.
uint32_t next_call(const uint64_t* memory, int64_t vector) {
  uint32_t* calls = reinterpret_cast<uint32_t*>(memory[RANK] + uint64_t(4) * RANKS * VECTORS * 16) + vector / 32;
  const uint32_t call = *reinterpret_cast<volatile uint32_t*>(calls) + 1;
  __syncwarp();
  if (threadIdx.x % 32 == 0) *reinterpret_cast<volatile uint32_t*>(calls) = call;
  return call;
}
template <typename T>
union Sent {
  Pack<T> pack;
  uint32_t bits[4];
};
// The address at `to` of the words of `from`; the second one is VECTORS words after the first.
uint64_t words_of(const uint64_t* memory, int to, int from, int64_t vector, uint32_t call) {
  return memory[to] + (int64_t((call & 1) * RANKS + from) * 2 * VECTORS + vector) * 16;
}
template <typename T>
void send(const uint64_t* memory, int64_t vector, uint32_t call, const Pack<T>& own) {
  Sent<T> sent;
  sent.pack = own;
#pragma unroll
  for (int step = 1; step < RANKS; step++) {  // each rank begins with another one
    const uint64_t words = words_of(memory, (RANK + step) % RANKS, RANK, vector, call);
    store_word(words, sent.bits[0], sent.bits[1], call);
    store_word(words + VECTORS * 16, sent.bits[2], sent.bits[3], call);
  }
}
// The sum of what all ranks sent, in the order of ranks, so that all have the same bits.
template <typename T>
void receive(const uint64_t* memory, int64_t vector, uint32_t call, const Pack<T>& own, float (&total)[Pack<T>::size]) {
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++) {
    Sent<T> sent;
    sent.pack = own;
    if (rank != RANK) {
      const uint64_t words = words_of(memory, RANK, rank, vector, call);
      uint32_t first[2], second[2];
      do {  // both words are on the way at once
        load_word(words, sent.bits[0], sent.bits[1], first);
        load_word(words + VECTORS * 16, sent.bits[2], sent.bits[3], second);
      } while (first[0] != call || first[1] != call || second[0] != call || second[1] != call);
    }
#pragma unroll
    for (int j = 0; j < Pack<T>::size; j++) {
      const float value = float(sent.pack.values[j]);
      total[j] = rank == 0 ? value : total[j] + value;
    }
  }
}
