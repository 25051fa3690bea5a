// Which function of the first half a gated linear unit multiplies by the second half; in the order
// of bert_unpad/ops/glu.py.
#pragma once

#include <cstdint>

namespace bert_unpad {

enum class GluKind : int64_t { kGelu, kGeluTanh, kSilu, kRelu };

inline constexpr int64_t kGluKinds = 4;

}  // namespace bert_unpad
