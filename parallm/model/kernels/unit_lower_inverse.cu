// (I + L)^-1 of matrices (SIZE, SIZE), with L the part of `products` below the diagonal, by substitution.
// A thread takes a column of a matrix. MATRICES of a block.
extern "C" __global__ void unit_lower_inverse(const float* products, float* inverse, int matrices) {
  __shared__ float lower[MATRICES][SIZE][SIZE];
  const int64_t first = int64_t(blockIdx.x) * MATRICES;
  const int matrix = threadIdx.x / SIZE, column = threadIdx.x % SIZE;
  for (int i = threadIdx.x; i < MATRICES * SIZE * SIZE; i += MATRICES * SIZE)
    if (first + i / (SIZE * SIZE) < matrices) (&lower[0][0][0])[i] = products[first * SIZE * SIZE + i];
  __syncthreads();
  if (first + matrix >= matrices) return;
  float* to = inverse + (first + matrix) * SIZE * SIZE + column;
  float solved[SIZE];
#pragma unroll
  for (int row = 0; row < SIZE; row++) {
    float value = row == column ? 1.0f : 0.0f;
#pragma unroll
    for (int k = 0; k < row; k++) value -= lower[matrix][row][k] * solved[k];
    to[row * SIZE] = solved[row] = value;
  }
}
