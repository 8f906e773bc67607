// Lists the pages that a step's rows see, one row after the other, in shares of as many pages: row, page, first
// position, row's length. Share s begins at entry s `stride`; row -1 says that it is empty. `counts` are the pages of a
// share, the pages of all, and a zero for each of `heads` of each row. `part_sums` and `part_scales` are not written: they
// are memory that the layers use one after the other, since the host allocates each array of a launch. Rows have `width`
// pages in `tables` and see `lengths` + 1 positions, the newest `window` (0: all). A block for each row. PAGE positions.
#include "dependent.cuh"

extern "C" __global__ void paged_attention_plan(const int* tables, const int* lengths, int4* pages, int* counts,
                                                float* part_sums, float* part_scales, int rows, int width, int window,
                                                int heads, int shares, int stride) {
  wait_for_inputs();
  auto first_page = [&](int length) { return window > 0 ? max(0, length + 1 - window) / PAGE : 0; };
  __shared__ int before, all;  // pages of the rows before this one, and of all
  if (threadIdx.x == 0) before = all = 0;
  __syncthreads();
  const int row = blockIdx.x;
  int own_before = 0, own_all = 0;
  for (int other = threadIdx.x; other < rows; other += blockDim.x) {
    const int count = lengths[other] / PAGE - first_page(lengths[other]) + 1;
    own_all += count;
    if (other < row) own_before += count;
  }
  atomicAdd(&before, own_before);
  atomicAdd(&all, own_all);
  __syncthreads();
  const int of_share = (all + shares - 1) / shares;
  const int length = lengths[row], first = first_page(length);
  for (int page = first + threadIdx.x; page <= length / PAGE; page += blockDim.x) {
    const int index = before + page - first;
    const int place = index / of_share * stride + index % of_share;
    pages[place] = make_int4(row, tables[row * width + page], page * PAGE, length);
  }
  for (int head = threadIdx.x; head < heads; head += blockDim.x) counts[2 + row * heads + head] = 0;
  if (row > 0) return;
  if (threadIdx.x == 0) {
    counts[0] = of_share;
    counts[1] = all;
  }
  for (int share = (all + of_share - 1) / of_share + threadIdx.x; share < shares; share += blockDim.x)
    pages[share * stride] = make_int4(-1, 0, 0, 0);
}
