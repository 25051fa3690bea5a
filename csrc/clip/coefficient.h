// The factor that a bucket is multiplied with; one function for the CPU and the GPU.
#pragma once

#include "common/finite.h"
#include "common/macros.h"

namespace bert_unpad {

// min(1, bound / norm) * factor. A norm that is no finite number makes all of the bucket NaN, so
// that no rank can miss it after the buckets are added up; so does a bound that is NaN.
BU_HD float clip_scale(float norm, float bound, float factor) {
  if (!is_finite(norm)) return norm - norm;
  return norm <= bound ? factor : bound / norm * factor;
}

}  // namespace bert_unpad
