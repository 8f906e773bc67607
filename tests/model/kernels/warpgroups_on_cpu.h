// Warpgroups of Hopper, after cuda_on_cpu.h.
#include <functional>
#include <map>

// PTX, "Asynchronous Warpgroup Level Matrix Instructions". A group of products is done at once or when it
// is waited for, which each thread draws.
struct Matrix {
  unsigned start, leading, stride;
};
Matrix describe(unsigned start, unsigned leading, unsigned stride) {
  CHECK(start % 16 == 0 && start < num_shared && leading % 16 == 0 && stride % 16 == 0);
  return {start, leading, stride};
}
// A value `inside` a row of 128 bytes, of rows of which 8 begin where the stride says
template <typename Half>
float swizzled(const Matrix& matrix, int row, int64_t inside) {
  unsigned at = matrix.start + row / 8 * matrix.stride + row % 8 * 128 + inside;
  at ^= (at >> 7 & 7) << 4;
  CHECK(at < num_shared);
  if (is_hidden[at / 4]) return NAN;
  return float(*reinterpret_cast<const Half*>(shared_memory + at));
}
struct ThreadProducts {
  std::vector<std::vector<std::function<void()>>> groups;  // the last one is open
  bool waits;
} products[MAX_THREADS];
void add_product(std::function<void()> product) {
  auto& [groups, waits] = products[threadIdx.x];
  if (groups.back().empty()) waits = random_numbers() % 2;
  groups.back().push_back(waits ? product : [] {});
  if (!waits) product();
}
template <typename Half>
struct Products {
  // `left(r, k)` of this thread's two rows, `right(k, column)`
  template <int N, typename Left, typename Right>
  static void add(float (&sums)[N], bool adds, Left left, Right right) {
    const int thread = threadIdx.x, lane = thread % 32;
    add_product([=, &sums] {
      for (int i = 0; i < N && !adds; i++) sums[i] = 0;
      for (int r = 0; r < 2; r++)
        for (int k = 0; k < 16; k++) {
          const float a = left(r, k);
          for (int i = 0; i < N / 2; i++) {
            const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
            sums[i / 2 * 4 + r * 2 + i % 2] += a * right(k, column);
          }
        }
    });
  }
  template <int N>
  static void add_rows(float (&sums)[N], Matrix a, Matrix b, bool adds) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    add(
        sums, adds, [=](int r, int k) { return swizzled<Half>(a, row + r * 8, k * 2); },
        [=](int k, int column) { return swizzled<Half>(b, column, k * 2); });
  }
  template <int N>
  static void add_columns(float (&sums)[N], const unsigned (&a)[4], Matrix b) {
    struct Operand {
      Half values[4][2];
    } own;
    std::memcpy(&own, a, sizeof(own));
    struct Rows {
      float values[2][16];
    };
    const int lane = threadIdx.x % 32;
    const Rows rows = exchange(own, [=](auto of) {
      Rows rows;
      for (int r = 0; r < 2; r++)
        for (int k = 0; k < 16; k++)
          rows.values[r][k] = float(of(lane / 4 * 4 + k % 8 / 2).values[r + k / 8 * 2][k % 2]);
      return rows;
    });
    add(
        sums, true, [=](int r, int k) { return rows.values[r][k]; },
        [=](int k, int column) { return swizzled<Half>(b, k, column / 64 * b.leading + column % 64 * 2); });
  }
};
void begin_products() {}
void commit_products() { products[threadIdx.x].groups.emplace_back(); }
template <int N>
void wait_products() {
  auto& groups = products[threadIdx.x].groups;
  for (; groups.size() > N + 1; groups.erase(groups.begin()))
    for (const auto& product : groups.front()) product();
  __syncwarp();
}
template <typename Operands>
void hold(Operands&) {}
void show_copies() {
  for (const auto& [at, bytes] : unshown[threadIdx.x]) set_hidden(at, bytes, false);
  unshown[threadIdx.x].clear();
}
struct SharedBarrier {
  int count, left, phase;
};
std::map<unsigned, SharedBarrier> shared_barriers;
void init_barrier(unsigned at, int count) {
  CHECK(at % 8 == 0 && at + 8 <= num_shared);
  shared_barriers[at] = {count, count, 0};
}
void arrive(unsigned at) {
  SharedBarrier& barrier = shared_barriers.at(at);
  if (--barrier.left > 0) return;
  barrier.left = barrier.count;
  barrier.phase ^= 1;
}
void wait_barrier(unsigned at, int parity) { wait_while(shared_barriers.at(at).phase, parity); }
Barrier group_barriers[MAX_THREADS / 128];
void sync_group(int group) { group_barriers[group].wait(128); }
template <int N>
void take_registers() {}
template <int N>
void give_registers() {}

const bool has_warpgroups = [] {
  begin_warpgroups = [] {
    shared_barriers.clear();
    for (int thread = 0; thread < num_threads; thread++) products[thread].groups.assign(1, {});
  };
  return true;
}();
