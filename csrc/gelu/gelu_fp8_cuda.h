// gelu(x + bias) in 8 bits on a GPU: what the binding hands to the kernels. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"
#include "cuda/fp8_result.h"

namespace bert_unpad::cuda {

// Activations are [rows, columns], contiguous, of `dtype`; bias [columns] of `bias_dtype`.
struct GeluFp8Params : Fp8Result {
  DType dtype, bias_dtype;
  bool tanh;
  const void* x;
  const void* bias;  // null where there is none
  const void* dy;
  const float* scale;  // what q is to be multiplied with
  float* largest;      // [kFp8Largest]; null: not wanted
  void* dbias;         // null where there is no bias
  float* partials;     // [fp8_tile_rows(p), columns]: scratch memory of dbias
};

// q = round(gelu(x + bias) / scale) in E4M3. Values too large for the scale become the format's
// largest, those that are not finite NaN. `largest` keeps the largest values before rounding, where
// they are above what is there.
void bias_gelu_fp8(const GeluFp8Params& p, cudaStream_t stream);

// The same of dx = dy * gelu'(x + bias), in E5M2, and dbias = the columns' sums of dx before
// rounding, in a fixed order.
void bias_gelu_fp8_backward(const GeluFp8Params& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
