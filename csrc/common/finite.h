// Whether a number is finite, by one rule for the CPU and the GPU.
#pragma once

#include "common/macros.h"

namespace bert_unpad {

// The difference of NaN and of an infinity with itself is not 0.
BU_HD bool is_finite(float x) { return x - x == 0.0f; }

}  // namespace bert_unpad
