// Reductions within a thread block, in an order that depends on the block's shape alone, so that
// the same inputs give the same bits.
#pragma once

#include "device/macros.h"

namespace bert_unpad {

// Adds up `values` over the threads that share threadIdx.x, in the order of threadIdx.y; the sums
// are in the threads with threadIdx.y == 0. All threads of the block must call it. `shared` holds
// (blockDim.y - 1) * blockDim.x * N floats and must be free: whoever used it before synchronises.
template <int N>
BU_DEVICE void sum_over_y(float (&values)[N], float* shared) {
  const unsigned width = blockDim.x;
  if (threadIdx.y > 0) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      shared[((threadIdx.y - 1) * N + i) * width + threadIdx.x] = values[i];
  }
  __syncthreads();
  if (threadIdx.y == 0) {
    for (unsigned y = 0; y + 1 < blockDim.y; ++y) {
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] += shared[(y * N + i) * width + threadIdx.x];
    }
  }
}

// Bytes of shared memory that sum_over_y needs.
inline constexpr unsigned sum_over_y_bytes(unsigned width, unsigned height, int n) {
  return (height - 1) * width * static_cast<unsigned>(n) * sizeof(float);
}

}  // namespace bert_unpad
