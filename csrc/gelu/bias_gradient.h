// The end of the activations' backward kernels: the gradient of the bias, the columns' sums of dx.
//
// A block works on a narrow strip of columns and on many of its rows: so few rows of partial sums
// are written, and the last block of a strip has little to add up.
#pragma once

#include <algorithm>

#include "cuda/last_block.h"
#include "cuda/reduce.h"
#include "cuda/sum_rows.h"
#include "gelu/column_grid.h"

namespace bert_unpad::cuda {

// Bytes of a row that a block of a backward kernel takes at most: 128 columns in 16 bits.
inline constexpr int64_t kStripBytes = 256;
// Rows of partial sums, one a block, that one block may add up by itself (RowGroups).
inline constexpr int kStripRows = 32;

template <class Params>
ColumnGrid backward_grid(const Params& p, int64_t width, const char* op, int blocks_per_sm) {
  return column_grid(p, width, op, blocks_per_sm, kStripBytes);
}

// What `p.partials` and `p.tickets` are, for `width` columns that threads share.
template <class Params>
ColumnScratch bias_gradient_scratch(const Params& p, int64_t width, const char* op,
                                    int blocks_per_sm) {
  if (p.rows == 0 || width == 0) return {};
  const ColumnGrid g = backward_grid(p, width, op, blocks_per_sm);
  return column_scratch(g.grid.y, kStripRows, g.grid.x);
}

// Bytes of shared memory; N: columns of a thread, kParts: runs of `width` columns.
template <int N, int kParts>
constexpr uint32_t bias_gradient_shared_bytes() {
  return kParts * ColumnGrid::kThreads * N * sizeof(float);
}

// `sums`: of this thread's rows, N columns of each of the kParts parts of a row, which have `width`
// columns each. All threads of the block call it.
template <int kParts, int N, class Params>
BU_DEVICE void finish_bias_gradient(const Params& p, int64_t width,
                                    const float (&sums)[kParts][N]) {
  const int columns = blockDim.x * N;  // of the strip; no more than threads
  const int64_t strip = static_cast<int64_t>(blockIdx.x) * columns;
  const uint32_t part_bytes = 4 * blockDim.y * columns;
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    store_shared_row(part * part_bytes + 4 * (threadIdx.y * columns + threadIdx.x * N), sums[part]);
  sync_block();
  const auto partial = [&](int row, int part, int column) {
    return p.partials + (static_cast<int64_t>(row) * kParts + part) * width + strip + column;
  };
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    sum_shared_rows<1>(part * part_bytes, columns, [&](int column, const float (&sum)[1]) {
      if (strip + column < width) store_global<float>(partial(blockIdx.y, part, column), sum[0]);
    });
  }
  const RowGroups groups(static_cast<int>(gridDim.y), kStripRows);
  const int column = threadIdx.y * blockDim.x + threadIdx.x;
  finish_sums(groups, blockIdx.y, p.tickets + blockIdx.x * groups.tickets(), 0,
              [&](int first, int count, int to) {
                if (column >= columns || strip + column >= width) return;
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                  const float* const from = partial(first, part, column);
                  float sum[1] = {0.0f};
                  sum_rows<8>(sum, count, [&](int r) { return from + r * kParts * width; });
                  if (to == kResult)
                    store_parameter(p.dbias, p.bias_dtype, part * width + strip + column, sum[0]);
                  else
                    store_global<float>(partial(to, part, column), sum[0]);
                }
              });
}

}  // namespace bert_unpad::cuda
