// What a kernel that finishes its column sums itself (cuda/last_block.h) needs from its caller.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/macros.h"
#include "common/types.h"
#include "cuda/error.h"

namespace bert_unpad {

// Rows of partial sums, one a block, in groups of neighbours; one group where there are no more
// than `at_once`, because reading these takes less time than a second round of tickets.
struct RowGroups {
  int rows, size, count;

  BU_HD RowGroups(int rows, int at_once) : rows(rows), size(rows), count(1) {
    if (rows <= at_once) return;
    // The square root: then the blocks that come last read fewest rows.
    for (size = 1; size * size < rows;) ++size;
    count = (rows + size - 1) / size;
  }

  // Of blocks, and after them of groups.
  BU_HD int scratch_rows() const { return count > 1 ? rows + count : rows; }
  // Of all groups, then of each.
  BU_HD int tickets() const { return 1 + count; }
};

namespace cuda {

// fp32 rows of scratch memory, per matrix of sums, and counters (cuda/tickets.h).
struct ColumnScratch {
  int64_t rows, tickets;
};

// For `blocks` that add a row each, in `strips` of columns, each with its own counters; `at_once`
// as in RowGroups.
inline ColumnScratch column_scratch(unsigned blocks, int at_once, unsigned strips = 1) {
  const RowGroups groups(static_cast<int>(blocks), at_once);
  return {groups.scratch_rows(), int64_t{strips} * groups.tickets()};
}

// Sums over no rows; `out` may be null.
inline void zero_columns(const char* op, void* out, DType dtype, int64_t columns,
                         cudaStream_t stream) {
  if (out != nullptr)
    check_cuda(cudaMemsetAsync(out, 0, columns * element_size(dtype), stream), op);
}

}  // namespace cuda
}  // namespace bert_unpad
