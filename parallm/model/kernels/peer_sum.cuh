// Sums over all ranks, each of which writes its own vectors into the memory of the others.
// `memory` holds the address of each rank's part, as this rank sees it. A part has a word for each turn, rank and vector,
// then a count of calls for each warp's vectors, whichever kernel sums them.
// RANKS, RANK own number, VECTORS that a part has room for, TURNS calls until a word is written again, EMPTY quarter.
// Words say themselves whether they have come, so there are no barriers, and nothing but values is sent: a quarter that
// is EMPTY has not, and no rank sends that one (as the Lamport buffers of TensorRT-LLM's all-reduce): it is two numbers
// -0.0 of 16 bits, in place of which zeros go, or one of float32 that is next to zero. Each call empties the words that
// the call before has read. Whoever writes them again has ended the two calls between, and so has had a word that this
// rank sent after it had emptied them: a rank's kernels run one after the other. Three turns would do; four go on where
// the count begins anew.
static_assert(TURNS >= 3 && (TURNS & TURNS - 1) == 0, "turns follow each other where a count begins anew");

// The number of this call for the vectors of this warp, which begin at a multiple of 32; for whole warps.
uint32_t next_call(const uint64_t* memory, int64_t vector) {
  uint32_t* calls = reinterpret_cast<uint32_t*>(memory[RANK] + uint64_t(TURNS) * RANKS * VECTORS * 16) + vector / 32;
  const uint32_t call = *reinterpret_cast<volatile uint32_t*>(calls) + 1;
  __syncwarp();
  if (threadIdx.x % 32 == 0) *reinterpret_cast<volatile uint32_t*>(calls) = call;
  return call;
}
template <typename T>
union Word {
  Pack<T> pack;
  uint32_t quarters[4];
};
// The address at `to` of the word of `from`.
uint64_t word_of(const uint64_t* memory, int to, int from, int64_t vector, uint32_t call) {
  return memory[to] + (int64_t(call % TURNS * RANKS + from) * VECTORS + vector) * 16;
}
// Sends `own`, and leaves there what others get.
template <typename T>
void send(const uint64_t* memory, int64_t vector, uint32_t call, Pack<T>& own) {
  Word<T> word;
  word.pack = own;
#pragma unroll
  for (uint32_t& quarter : word.quarters) quarter = quarter == EMPTY ? 0 : quarter;
#pragma unroll
  for (int step = 1; step < RANKS; step++) {  // each rank begins with another one
    store_word(word_of(memory, (RANK + step) % RANKS, RANK, vector, call), word.quarters);
  }
  own = word.pack;
}
// Empties the words of the call before; for whole warps, also where a thread sums nothing.
void empty(const uint64_t* memory, int64_t vector, uint32_t call) {
  const uint32_t quarters[4] = {EMPTY, EMPTY, EMPTY, EMPTY};
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++)
    if (rank != RANK) store_word(word_of(memory, RANK, rank, vector, call - 1), quarters);
}
// The sum of what all ranks sent, in the order of ranks, so that all have the same bits.
template <typename T>
void receive(const uint64_t* memory, int64_t vector, uint32_t call, const Pack<T>& own, float (&total)[Pack<T>::size]) {
  Word<T> words[RANKS];
  words[RANK].pack = own;
  bool waits;
  do {  // all words are on the way at once
    waits = false;
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
      if (rank != RANK) load_word(word_of(memory, RANK, rank, vector, call), words[rank].quarters);
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
#pragma unroll
      for (int quarter = 0; quarter < 4; quarter++)
        waits = waits || rank != RANK && words[rank].quarters[quarter] == EMPTY;
  } while (waits);
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++)
#pragma unroll
    for (int j = 0; j < Pack<T>::size; j++) {
      const float value = float(words[rank].pack.values[j]);
      total[j] = rank == 0 ? value : total[j] + value;
    }
}
