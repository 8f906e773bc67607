// Cosine and sine of PAIRS pairs at each of `offsets`.
// Frequencies are those of the base whose log2 is numbers[1] if BY_BASE, else 1 over `wavelengths`.
#include "dependent.cuh"

extern "C" __global__ void rotary_angles(const int* offsets, const float* wavelengths, const float* numbers,
                                         float* angles, int num_offsets) {
  wait_for_inputs();
  const int index = blockIdx.x * blockDim.x + threadIdx.x, pair = index % PAIRS;
  if (index >= PAIRS * num_offsets) return;
  // As MLX's own kernel computes them
  float part = static_cast<float>(pair) / static_cast<float>(PAIRS);
  float frequency = BY_BASE ? exp2f(-part * numbers[1]) : static_cast<float>(1.0 / wavelengths[pair]);
  float angle = numbers[0] * static_cast<float>(offsets[index / PAIRS]) * frequency;
  angles[2 * index] = cosf(angle);
  angles[2 * index + 1] = sinf(angle);
}
