// Gated linear units: what the binding hands to the CPU kernels.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "cpu/isa.h"
#include "gelu/glu_kind.h"

namespace bert_unpad {

// x is [rows, 2 * width], contiguous, y and dy are [rows, width]; the bias is fp32 [2 * width].
struct GluCpuParams {
  DType dtype;
  GluKind kind;
  int64_t width;
  const void *x, *dy;
  const float* bias;
  void* out;  // y in the forward pass, dx in the backward pass
};

struct GluKernels {
  void (*forward)(const GluCpuParams&, int64_t begin, int64_t end);  // rows [begin, end)
  // Also writes to dbias [2 * width] the column sums of these rows of dx; null: not wanted.
  void (*backward)(const GluCpuParams&, int64_t begin, int64_t end, float* dbias);
};
BU_ISA_TABLE(GluKernels, glu_kernels)

}  // namespace bert_unpad
