// The product of a linear layer in fp32 for any number of rows.
//
// Libraries compile or choose code for each shape: oneDNN keeps 0.4 MB for every number of tokens
// that it has seen, and packed batches have a new one nearly always. Here one piece of code serves
// all. Weights are packed once a call, in pieces that stay in the second-level cache.
#include "linear/product.h"

#include "cpu/gemm_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

constexpr int kRows = 32 * kTileRows;
constexpr int kDepth = 256;  // of a piece of a panel, which stays in a cache for all rows

void pack_panel(const ProductCpuParams& p, int64_t column) {
  const int64_t left = p.columns - column;
  const int width = static_cast<int>(left < kPanel ? left : kPanel);
  const int depth = static_cast<int>(p.depth);
  float* out = p.panels + (column - p.first) * p.depth;
  if (p.transposed)
    pack(p.weight + column, p.weight_stride, depth, width, 1.0f, out);
  else
    pack_transposed(p.weight + column * p.weight_stride, p.weight_stride, width, depth, out);
}

// y += bias, addend. Sums that began with these would be rounded to their size at each step.
void finish(const ProductCpuParams& p, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  for (int64_t i = row; i < row + rows; ++i) {
    float* y = p.y + i * p.y_stride + column;
    const float* addend = p.addend ? p.addend + i * p.columns + column : nullptr;
    for (int64_t j = 0; j < columns; j += kLanes) {
      f32v v = load(y + j);
      if (p.bias) v += load(p.bias + column + j);
      if (addend) v += load(addend + j);
      store(y + j, v);
    }
  }
}

void block(const ProductCpuParams& p, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const float* panels = p.panels + (column - p.first) * p.depth;
  for (int64_t k = 0; k < p.depth; k += kDepth) {
    const int depth = static_cast<int>(p.depth - k < kDepth ? p.depth - k : kDepth);
    gemm({p.x + row * p.x_stride + k, p.x_stride, 1}, static_cast<int>(rows),
         static_cast<int>(columns), depth, {panels + k * kPanel, p.depth * kPanel},
         p.y + row * p.y_stride + column, p.y_stride, k > 0);
  }
  if (p.bias || p.addend) finish(p, row, rows, column, columns);
}

// Rows and columns of a tile of sums, each of whose lanes adds up a part of the depth.
constexpr int kFewRows = kVectorRegisters == 32 ? 6 : 2;
constexpr int kFewColumns = 4;

BU_INLINE f32x4 load4(const float* p) {
  f32x4 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <int M>
void narrow_tile(const ProductCpuParams& p, int64_t row, int64_t column) {
  const float* x = p.x + row * p.x_stride;
  const float* weight = p.weight + column * p.weight_stride;
  f32v sums[M][kFewColumns] = {};
  for (int64_t k = 0; k < p.depth; k += kLanes) {
    f32v w[kFewColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kFewColumns; ++c) {
      w[c] = load(weight + c * p.weight_stride + k);
      // Of the next columns: the hardware's prefetchers stop at the end of a page.
      __builtin_prefetch(weight + (kFewColumns + c) * p.weight_stride + k);
    }
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i) {
      const f32v v = load(x + i * p.x_stride + k);
#pragma GCC unroll 4
      for (int c = 0; c < kFewColumns; ++c) sums[i][c] += v * w[c];
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < M; ++i) {
    f32x4 y = reduce_add(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    if (p.bias) y += load4(p.bias + column);
    if (p.addend) y += load4(p.addend + (row + i) * p.columns + column);
    __builtin_memcpy(p.y + (row + i) * p.y_stride + column, &y, sizeof y);
  }
}

template <int M>
BU_INLINE void narrow_rest(const ProductCpuParams& p, int64_t row, int64_t column) {
  if constexpr (M > 0) {
    if (p.rows - row == M) return narrow_tile<M>(p, row, column);
    narrow_rest<M - 1>(p, row, column);
  }
}

// Weights pass through the first-level cache once.
void narrow(const ProductCpuParams& p, int64_t column, int64_t columns) {
  for (int64_t j = column; j < column + columns; j += kFewColumns) {
    int64_t row = 0;
    for (; row + kFewRows <= p.rows; row += kFewRows) narrow_tile<kFewRows>(p, row, j);
    narrow_rest<kFewRows - 1>(p, row, j);
  }
}

// Up to this many rows that is faster than packing, measured with AVX-512.
constexpr int kMostNarrow = kVectorRegisters == 32 ? 36 : 16;

}  // namespace

extern const ProductKernels product_kernels = {kPanel,     kRows, kMostNarrow,
                                               pack_panel, block, narrow};

}  // namespace bert_unpad::BERT_UNPAD_ISA
