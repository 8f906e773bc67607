// The factor of an RMSNorm for the row of a block, from each thread's sum of squares.
// SIZE of a row, THREADS of a block that have squares: the first ones.
float row_scale(float squares, float eps) {
  constexpr int warps = THREADS / 32;
  __shared__ float of_warp[warps];
  auto added = [](float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
  };
  squares = added(squares);
  if (threadIdx.x % 32 == 0 && threadIdx.x < THREADS) of_warp[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = added(threadIdx.x % 32 < warps ? of_warp[threadIdx.x % 32] : 0.0f);
  return rsqrtf(squares / SIZE + eps);
}
