// Dropout + residual + LayerNorm or RMSNorm: what the bindings hand to the CPU kernels.
#pragma once

#include <cstdint>

#include "common/philox.h"
#include "common/types.h"
#include "cpu/isa.h"

namespace bert_unpad {

// Activations are [rows, hidden], contiguous. Parameters are fp32, padded to whole vectors; zeros
// where there is none.
struct NormCpuParams {
  DType dtype;
  int64_t hidden;
  int64_t padded;  // hidden rounded up to whole vectors: row length of fp32 scratch and sums
  float eps;
  uint32_t keep_threshold;  // of 65,536; 65,536 = no dropout
  RngKey rng;
  // What is normalised is x itself: nothing is added, or, in the backward pass, x is the sum that
  // the forward pass returned.
  bool plain;
  bool x_bias_gradient;
  const void *x, *residual, *dy;  // residual: null where there is none
  const void* dsum;               // null where there is none
  const float *x_bias, *weight, *bias;
  void *y, *dx;
  void* sum;           // null where it is not wanted
  void* dresidual;     // null where it equals dx or is not wanted
  float *mean, *rstd;  // [rows]; mean is null for RMSNorm
};

struct NormKernels {
  // Rows [begin, end). Scratch: 2 rows of `padded` floats and the dropout words of a row.
  void (*forward)(const NormCpuParams&, int64_t begin, int64_t end, float* scratch);
  // Also writes to sums [3][padded] what these rows add to dweight, dbias and, where it is wanted,
  // dx_bias.
  void (*backward)(const NormCpuParams&, int64_t begin, int64_t end, float* scratch, float* sums);
};
BU_ISA_TABLE(NormKernels, norm_kernels)

}  // namespace bert_unpad
