// The tiles of rows in the order of their experts: (M, 4) of the expert, its first row of the tile, the rows of the tile,
// 0. A tile holds rows of one expert alone; those after the last have no rows. One block; `experts` (N,) are sorted, and
// less than `num_experts`, at most THREADS.
constexpr int THREADS = 1024;

extern "C" __global__ void __launch_bounds__(THREADS)
    grouped_gemm_tiles(const uint32_t* experts, int4* tiles, int num_rows, int num_experts, int num_tiles) {
  __shared__ int starts[THREADS + 1];
  __shared__ int sums[THREADS];  // tiles of an expert and of those before it
  const int expert = threadIdx.x;
  int low = 0, high = num_rows;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (experts[middle] < expert)
      low = middle + 1;
    else
      high = middle;
  }
  starts[expert] = low;
  if (expert == 0) starts[THREADS] = num_rows;
  __syncthreads();
  sums[expert] = (starts[expert + 1] - starts[expert] + ROWS - 1) / ROWS;
  for (int step = 1; step < THREADS; step *= 2) {
    __syncthreads();
    const int before = expert >= step ? sums[expert - step] : 0;
    __syncthreads();
    sums[expert] += before;
  }
  __syncthreads();
  for (int tile = threadIdx.x; tile < num_tiles; tile += THREADS) {
    int low = 0, high = num_experts;  // the first expert of which this tile or a later one is the last
    while (low < high) {
      const int middle = (low + high) / 2;
      if (sums[middle] <= tile)
        low = middle + 1;
      else
        high = middle;
    }
    int4 found = make_int4(0, 0, 0, 0);
    if (low < num_experts) {
      const int first = starts[low] + (tile - (low > 0 ? sums[low - 1] : 0)) * ROWS;
      found = make_int4(low, first, min(ROWS, starts[low + 1] - first), 0);
    }
    tiles[tile] = found;
  }
}
