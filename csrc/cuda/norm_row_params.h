// The part of the params that all CUDA kernels with a LayerNorm or RMSNorm share. No torch here.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace bert_unpad::cuda {

struct RowNormParams {
  DType dtype;            // of activations
  DType parameter_dtype;  // of weight, bias and their gradients
  int64_t rows, hidden;   // hidden < 2^31
  float eps;
  uint32_t keep_threshold;  // of 65,536; 65,536 = no dropout
  const int64_t* rng;       // (seed, offset) on the device; null without dropout
  const void *weight, *bias;
  const void* dy;
  float *mean, *rstd;  // [rows]; mean is null for RMSNorm, which takes it for 0
  void *dweight, *dbias;
  // Scratch memory [sums, rows, hidden], of which ColumnScratch says how many rows: what each block
  // adds to dweight, dbias and, where the operator has it, dx_bias.
  float* partials;
  uint32_t* tickets;  // as many as ColumnScratch says (cuda/tickets.h)
};

}  // namespace bert_unpad::cuda
