// Clipping of a gradient bucket: what the bindings hand to the CPU kernels.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace bert_unpad {

// The bucket is a run of numbers; `out` may be the bucket itself. The dtypes are equal, or one of
// them is fp32. With a residual, which an fp32
// bucket alone has, bucket + residual is what is clipped, and what rounding to `out` loses of it is
// the new residual.
struct ClipCpuParams {
  DType dtype, out_dtype;
  const void* bucket;
  void* out;
  float* residual;  // null where there is none
};

struct ClipKernels {
  // Sum of the squares of elements [begin, end).
  float (*sum_squares)(const ClipCpuParams&, int64_t begin, int64_t end);
  // out = scale * (bucket + residual); residual = what rounding has lost / factor.
  void (*scale)(const ClipCpuParams&, int64_t begin, int64_t end, float scale, float factor);
};

}  // namespace bert_unpad
