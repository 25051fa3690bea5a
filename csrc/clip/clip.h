// Clipping of a gradient bucket: what the bindings hand to the CPU kernels.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "cpu/isa.h"

namespace bert_unpad {

// `out` may be the bucket itself. The dtypes are equal, or one of them is fp32. Only an fp32 bucket
// has a residual: bucket + residual is then clipped, and what rounding to `out` loses becomes the
// new residual.
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
BU_ISA_TABLE(ClipKernels, clip_kernels)

}  // namespace bert_unpad
