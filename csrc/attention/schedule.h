// In which order sequences are started on a GPU: the `order` and `groups` arguments of attention.
//
// Long sequences first, so that short ones fill the end of the launch. `order` lists the sequences;
// `groups` cuts that list into at most 4 runs of like length, each a launch of its own with a grid
// no larger than its longest sequence needs. Values of `order` are read where they are, on the
// data's device, so the host checks its type alone; `groups` is host memory and checked fully.
#pragma once

#include <vector>

#include "attention/attention.h"
#include "common/checks.h"

namespace bert_unpad {

inline void check_schedule(const std::optional<Tensor>& order, const std::optional<Tensor>& groups,
                           const Tensor& data, int64_t sequences, const char* op) {
  check(order || !groups, op, ": groups cuts order into runs, so it needs order");
  if (order) {
    check(order->dim() == 1 && order->size(0) == sequences, op, ": order must have shape [",
          sequences, "], one entry a sequence, got ", shape_string(*order));
    check_dtype(*order, ScalarType::Int, op, "order", "int32");
    check_contiguous(*order, op, "order");
    check_same_device(*order, data, op, "order");
  }
  if (groups) {
    check(groups->dim() == 2 && groups->size(0) >= 1 && groups->size(0) <= kMaxAttentionGroups &&
              groups->size(1) == 3,
          op, ": groups must have shape [1 to ", kMaxAttentionGroups,
          ", 3] (sequences, longest query run, longest key run), got ", shape_string(*groups));
    check_dtype(*groups, ScalarType::Int, op, "groups", "int32");
    check(groups->is_cpu(), op, ": groups must be on the CPU");
    check_contiguous(*groups, op, "groups");
  }
}

// The rows of `groups`, which check_schedule has passed.
inline std::vector<AttentionGroup> read_groups(const Tensor& groups, int64_t sequences,
                                               const char* op) {
  std::vector<AttentionGroup> result;
  const auto* values = groups.const_data_ptr<int32_t>();
  int64_t total = 0;
  for (int64_t g = 0; g < groups.size(0); ++g) {
    const int32_t* row = values + 3 * g;
    check(row[0] >= 0 && row[1] >= 0 && row[2] >= 0, op, ": groups must not be negative, but row ",
          g, " is [", row[0], ", ", row[1], ", ", row[2], "]");
    result.push_back({row[0], row[1], row[2]});
    total += row[0];
  }
  check(total == sequences, op, ": the groups' sequences must add up to ", sequences, ", got ",
        total);
  return result;
}

}  // namespace bert_unpad
