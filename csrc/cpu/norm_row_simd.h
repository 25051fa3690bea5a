// LayerNorm of one fp32 row in scratch memory: the part that every operator with a LayerNorm
// shares.
#pragma once

#include "cpu/columns_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {

// 1 / sqrt(mean of (z - mean)^2 + eps) of z [n]; a mean of 0 gives RMSNorm's. Overwrites the
// padding of z.
BU_INLINE float row_rstd(float* z, int64_t n, float mean, float eps) {
  int64_t padded = n;
  for (; padded % kLanes; ++padded) z[padded] = mean;
  f32v squares[2] = {};
  int64_t j = 0;
  for (; j + 2 * kLanes <= padded; j += 2 * kLanes) {
    const f32v a = load(z + j) - mean, b = load(z + j + kLanes) - mean;
    squares[0] += a * a;
    squares[1] += b * b;
  }
  if (j < padded) {
    const f32v a = load(z + j) - mean;
    squares[0] += a * a;
  }
  return 1.0f / __builtin_sqrtf(reduce_add(squares[0] + squares[1]) / static_cast<float>(n) + eps);
}

// Mean and reciprocal standard deviation of z [n], whose sum is known. Two passes: the variance of
// the differences does not cancel. Overwrites the padding of z.
BU_INLINE void row_statistics(float* z, int64_t n, f32v total, float eps, float& mean,
                              float& rstd) {
  mean = reduce_add(total) / static_cast<float>(n);
  rstd = row_rstd(z, n, mean, eps);
}

}  // namespace bert_unpad::BERT_UNPAD_ISA
