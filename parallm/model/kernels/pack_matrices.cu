// Matrices of LoRA one after the other, cast and scaled. Inputs are the matrices, float32, `table` (M, 5) and `factors`
// (M): the place of a matrix in the output, its rows and columns there, how many of these rows it has itself (zeros
// follow), and whether it is transposed.
// POINTERS are the parameters `matrix0`, `matrix1` ...; CASES choose among them. T type of the output. `sharing` blocks
// pack a matrix.

extern "C" __global__ void pack_matrices(POINTERS, const int* table, const float* factors, T* packed, int sharing) {
  const int index = blockIdx.x / sharing;
  const float* matrix = matrix0;
  switch (index) {
    CASES
  }
  const int* own = table + 5 * index;
  const int rows = own[1], columns = own[2], filled = own[3];
  const bool is_transposed = own[4];
  const float factor = factors[index];
  T* to = packed + own[0];
  for (int i = blockIdx.x % sharing * blockDim.x + threadIdx.x; i < rows * columns; i += sharing * blockDim.x) {
    const int row = i / columns, column = i % columns;
    to[i] = row < filled ? T(matrix[is_transposed ? column * filled + row : i] * factor) : T(0.0f);
  }
}
