// What all kernels need below cuda_on_cpu.h: compiled once, it is a part of the library of each.
#include <sched.h>
#include <setjmp.h>
#include <ucontext.h>

#include "cuda_on_cpu.h"

Size3 threadIdx, blockIdx, blockDim, gridDim;
Random random_numbers;

// Fibers. A context starts one; jumps go on with it, since swapcontext asks the kernel for signal masks each time.
constexpr int STACK = 1 << 16;
ucontext_t caller, starts[MAX_THREADS];
jmp_buf places[MAX_THREADS];
std::vector<char> stacks[MAX_THREADS];
bool begun[MAX_THREADS], ended[MAX_THREADS];
struct Wait {
  const int* at;
  int value;
} waits[MAX_THREADS];  // a fiber goes on when `*at` is no longer `value`
int num_threads;

static bool can_go_on(int fiber) { return !ended[fiber] && (!waits[fiber].at || *waits[fiber].at != waits[fiber].value); }

void go_to(int fiber) {
  threadIdx.x = fiber;
  if (begun[fiber]) _longjmp(places[fiber], 1);
  begun[fiber] = true;
  setcontext(&starts[fiber]);
}

void switch_from(int self) {
  const int start = random_numbers() % num_threads;
  int other = -1;
  for (int i = 0; i < num_threads && other < 0; i++)
    if (const int next = (start + i) % num_threads; can_go_on(next)) other = next;
  if (other < 0) {
    CHECK(std::all_of(ended, ended + num_threads, [](bool has) { return has; }));  // threads wait for one that never comes
    setcontext(&caller);
  }
  if (other == self) return;
  if (self < 0 || ended[self] || !_setjmp(places[self])) go_to(other);
}

void wait_while(const int& at, int value) {
  const int self = threadIdx.x;
  if (at != value) return;
  waits[self] = {&at, value};
  switch_from(self);
  waits[self] = {};
}

Barrier block_barrier, warp_barriers[MAX_THREADS / 32];

alignas(1024) char shared_memory[MAX_SHARED];
unsigned num_shared;
std::vector<std::pair<unsigned, int>> unshown[MAX_THREADS];
bool is_hidden[MAX_SHARED / 4];
std::vector<std::vector<Copy>> copies[MAX_THREADS];

constexpr int64_t MAX_LOADS = 100000000;  // of a launch that waits for what never comes
int64_t num_loads;
void store_word(uint64_t address, const uint32_t (&quarters)[4]) {
  uint32_t* at = reinterpret_cast<uint32_t*>(address);
  const int first = random_numbers() % 4;
  for (int step = 0; step < 4; step++) {
    const int quarter = (first + step) % 4;
    __atomic_store_n(at + quarter, quarters[quarter], __ATOMIC_RELAXED);
    if (step % 2) continue;
    sched_yield();  // so that another rank may see a part, also on one core
    switch_from(threadIdx.x);
  }
}
void load_word(uint64_t address, uint32_t (&quarters)[4]) {
  const uint32_t* at = reinterpret_cast<const uint32_t*>(address);
  for (int quarter = 0; quarter < 4; quarter++) quarters[quarter] = __atomic_load_n(at + quarter, __ATOMIC_RELAXED);
  if (++num_loads > MAX_LOADS) setcontext(&caller);
  switch_from(threadIdx.x);
}

void __trap() {
  num_loads = MAX_LOADS + 1;
  setcontext(&caller);
  abort();
}

void (*begin_warpgroups)();

bool launch(int blocks, int rows_of_blocks, int threads, unsigned shared, int seed, void (*kernel)()) {
  static void (*body)();
  body = kernel;
  num_threads = threads, num_shared = shared;
  blockDim = {threads, 1}, gridDim = {blocks, rows_of_blocks};
  random_numbers.seed(seed);
  num_loads = 0;
  std::vector<int> order(blocks * rows_of_blocks);
  for (int block = 0; block < order.size(); block++) order[block] = block;
  for (int block = order.size(); block > 1; block--) std::swap(order[block - 1], order[random_numbers() % block]);
  ucontext_t blank;
  getcontext(&blank);
  for (int block : order) {
    blockIdx = {block % blocks, block / blocks};
    std::memset(shared_memory, 0xff, sizeof(shared_memory));
    std::fill(is_hidden, std::end(is_hidden), false);
    if (begin_warpgroups) begin_warpgroups();
    for (int thread = 0; thread < threads; thread++) {
      begun[thread] = ended[thread] = false;
      waits[thread] = {};
      copies[thread].assign(1, {});
      unshown[thread].clear();
      stacks[thread].resize(STACK);
      starts[thread] = blank;
      starts[thread].uc_stack.ss_sp = stacks[thread].data();
      starts[thread].uc_stack.ss_size = STACK;
      makecontext(
          &starts[thread],
          +[] {
            body();
            ended[threadIdx.x] = true;
            switch_from(threadIdx.x);
          },
          0);
    }
    volatile bool has_run = false;
    getcontext(&caller);
    if (!has_run) {
      has_run = true;
      switch_from(-1);
    }
    if (num_loads > MAX_LOADS) return false;
  }
  return true;
}
