// Quantisation to 8 bits by a scale that is given. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include "common/types.h"
#include "cuda/fp8_result.h"

namespace bert_unpad::cuda {

struct ScaledParams : Fp8Result {
  DType dtype;  // of x
  bool e5m2;
  const void* x;
  const float* scale;  // what q is to be multiplied with
  float* largest;      // [kFp8Largest]; null: not wanted
  float* sums;         // [columns]; null: not wanted
  float* partials;     // [fp8_tile_rows(p), columns]: scratch memory of sums
};

// q = round(x / scale) by a scale that is given (delayed scaling). Values too large for it become
// the format's largest, those that are not finite NaN. `largest` keeps the largest values, where
// they are above what is there, `sums` the columns' sums before rounding, in a fixed order. `op`
// names the operator in error messages.
void quantize_fp8_scaled(const char* op, const ScaledParams& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
