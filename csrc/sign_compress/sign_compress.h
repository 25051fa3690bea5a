// Compression to signs with error feedback: what the bindings hand to the CPU kernels.
//
// Bit j % 8 of byte j / 8 is the sign bit of element j: 1 means negative. What follows the last
// element in its byte is 0.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "cpu/isa.h"

namespace bert_unpad {

struct SignCpuParams {
  DType dtype;        // of `value`
  const void* value;  // null: the error alone is compressed
  float* error;
  uint8_t* bits;
};

struct SignMeanCpuParams {
  const uint8_t* bits;  // [ranks, stride]
  int64_t stride;       // bytes of a rank
  int64_t ranks;
  const float* weights;  // [ranks]
  float* out;
  bool add;          // to what is in `out`
  bool past_caches;  // `out` is too large for them
};

// Each for elements [begin, end); `begin` is a multiple of 8.
struct SignKernels {
  // Sum of the squares of value + error.
  float (*sum_squares)(const SignCpuParams&, int64_t begin, int64_t end);
  // The bits of value + error; error = value + error - scale * sign.
  void (*pack)(const SignCpuParams&, int64_t begin, int64_t end, float scale);
  // Sum over ranks, in their order, of weight * sign.
  void (*mean)(const SignMeanCpuParams&, int64_t begin, int64_t end);
};
BU_FP32_TABLE(SignKernels, sign_kernels)

}  // namespace bert_unpad
