// The grid of the activations' kernels: threads that keep 16 bytes of columns.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

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

// `most_bytes`: of a row that a block takes.
template <class Params>
ColumnGrid column_grid(const Params& p, int64_t width, const char* op, int blocks_per_sm,
                       int64_t most_bytes = std::numeric_limits<int64_t>::max()) {
  const int vector = vector_width(p, width);
  return ColumnGrid(p.rows, width / vector, static_cast<int64_t>(sm_count(op)) * blocks_per_sm,
                    most_bytes / (vector * element_size(p.dtype)));
}

}  // namespace bert_unpad::cuda
