// The grid of the activations' kernels: threads that keep 16 bytes of columns.
#pragma once

#include <algorithm>
#include <array>

#include "cuda/launch.h"

namespace bert_unpad::cuda {

// Elements per thread: 16 bytes where every run of `width` elements, a row or half a row, starts at
// a multiple of 16 bytes, else one.
template <class Params>
int vector_width(const Params& p, int64_t width) {
  const int elements = 16 / element_size(p.dtype);
  const std::array<const void*, 4> operands{p.x, p.dy, p.y, p.dx};
  const bool aligned = width % elements == 0 && std::ranges::all_of(operands, [](const void* q) {
                         return is_aligned(q, 16);
                       });
  return aligned ? elements : 1;
}

template <class Params>
ColumnGrid column_grid(const Params& p, int64_t width, const char* op, int blocks_per_sm) {
  return ColumnGrid(p.rows, width / vector_width(p, width),
                    static_cast<int64_t>(sm_count(op)) * blocks_per_sm);
}

// Rows of partial sums that the backward kernel writes for the bias: one for each block of a
// column.
template <class Params>
int64_t partial_rows(const Params& p, int64_t width, const char* op, int blocks_per_sm) {
  return p.rows == 0 || width == 0 ? 0 : column_grid(p, width, op, blocks_per_sm).grid.y;
}

}  // namespace bert_unpad::cuda
