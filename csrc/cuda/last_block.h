// Column sums over all blocks of a kernel, finished by the kernel itself: no second kernel follows.
//
// Each block writes a row of partial sums. Where there are many rows, groups of neighbouring ones
// are summed first: by the block of the group that comes last; the last of these blocks adds up the
// groups. Which blocks are last changes from run to run. What they add, and in which order, does
// not: so the bits are the same. Only counters are atomic.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "cuda/column_scratch.h"
#include "cuda/primitives.h"

namespace bert_unpad {

// Whether `count` blocks have called this for the counter, this one included; it is 0 again after
// the last. What they wrote before is then visible. All threads of the block call it; from offset
// `shared` on, 4 bytes of shared memory are overwritten.
BU_DEVICE bool is_last_block(uint32_t* counter, int count, uint32_t shared) {
  const auto last = static_cast<uint32_t>(count - 1);
  sync_block();  // all threads have written, and have read what was at `shared`
  if (threadIdx.x == blockDim.x - 1 && threadIdx.y == blockDim.y - 1)
    store_shared<uint32_t>(shared, take_ticket(counter, last));
  sync_block();
  return load_shared<uint32_t>(shared) == last;
}

inline constexpr int kResult = -1;

// All threads of a block call this after they have written row `row` of the partial sums.
// sum_up(first, count, to) adds up `count` rows from `first` on; the sum is row `to`, or, where
// that is kResult, what the kernel returns. `tickets`: zeros before and after the kernel. From
// offset `shared` on, 4 bytes of shared memory are overwritten.
template <class SumUp>
BU_DEVICE void finish_sums(const RowGroups& groups, int row, uint32_t* tickets, uint32_t shared,
                           const SumUp& sum_up) {
  const int group = row / groups.size;
  int first = group * groups.size;
  int count = groups.rows - first < groups.size ? groups.rows - first : groups.size;
  int to = groups.count > 1 ? groups.rows + group : kResult;
  uint32_t* counter = tickets + 1 + group;
  while (is_last_block(counter, count, shared)) {
    sum_up(first, count, to);
    if (to == kResult) return;
    first = groups.rows;
    count = groups.count;
    to = kResult;
    counter = tickets;
  }
}

}  // namespace bert_unpad
