// Reductions within a warp and a thread block, in an order that depends only on the block's shape,
// so that the same inputs give the same bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "common/macros.h"
#include "cuda/primitives.h"
#include "cuda/vector.h"

namespace bert_unpad {

// Shuffles take 32 bits: 64 go in two halves.
BU_DEVICE double shuffle_xor(double x, int mask) {
  struct Halves {
    uint32_t a, b;
  };
  const auto own = std::bit_cast<Halves>(x);
  return std::bit_cast<double>(Halves{shuffle_xor(own.a, mask), shuffle_xor(own.b, mask)});
}

// Over all lanes of a warp; the result is in all of them. T: float, uint32_t or double.
template <class T>
BU_DEVICE T warp_sum(T x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
BU_DEVICE float warp_max(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
  return x;
}

// Over the four lanes whose numbers differ in the last two bits.
BU_DEVICE float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}
BU_DEVICE float quad_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}

// Adds up `values` over the threads that share threadIdx.x, in the order of threadIdx.y; the sums
// are in the threads with threadIdx.y == 0. All threads of the block must call it. From offset
// `shared` on, sum_over_y_bytes() of shared memory must be free: code that used it before must
// synchronise first.
template <int N>
BU_DEVICE void sum_over_y(float (&values)[N], uint32_t shared) {
  const uint32_t width = blockDim.x;
  if (threadIdx.y > 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t row = (threadIdx.y - 1) * N + static_cast<uint32_t>(i);
      store_shared(shared + 4 * (row * width + threadIdx.x), values[i]);
    }
  }
  sync_block();
  if (threadIdx.y == 0) {
    for (uint32_t y = 0; y + 1 < blockDim.y; ++y) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const uint32_t row = y * N + static_cast<uint32_t>(i);
        values[i] += load_shared<float>(shared + 4 * (row * width + threadIdx.x));
      }
    }
  }
}

// The same over the whole block, whose threadIdx.x are a warp's lanes; all of the first warp has
// the sums.
template <int N>
BU_DEVICE void sum_over_block(float (&values)[N], uint32_t shared) {
  sum_over_y(values, shared);
  if (threadIdx.y > 0) return;
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = warp_sum(values[i]);
}

// A thread's N neighbouring numbers go to shared memory, 16 bytes at a time where they fill them.
template <int N>
BU_DEVICE void store_shared_row(uint32_t offset, const float (&x)[N] BU_SITE) {
  constexpr int kPiece = N % 4 == 0 ? 4 : 1;
#pragma unroll
  for (int first = 0; first < N; first += kPiece) {
    Vector<float, kPiece> piece;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) piece.v[i] = x[first + i];
    store_shared(offset + 4 * static_cast<uint32_t>(first), piece BU_FROM_SITE);
  }
}

// Adds up [blockDim.y, columns] numbers in shared memory, which begin at offset `shared`, over the
// rows and in their order. All threads of the block share the columns: take(column, sum) gets N
// neighbouring ones. `columns` is a multiple of N.
template <int N, class Take>
BU_DEVICE void sum_shared_rows(uint32_t shared, int columns, const Take& take) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y;
  for (int column = thread * N; column < columns; column += threads * N) {
    float sum[N] = {};
    for (uint32_t y = 0; y < blockDim.y; ++y) {
      const auto x = load_shared<Vector<float, N>>(shared + 4 * (y * columns + column));
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += x.v[i];
    }
    take(column, sum);
  }
}

// Bytes of shared memory that sum_over_y needs.
inline constexpr unsigned sum_over_y_bytes(unsigned width, unsigned height, int n) {
  return (height - 1) * width * static_cast<unsigned>(n) * sizeof(float);
}

}  // namespace bert_unpad
