// Bias + GELU: what the bindings hand to the CPU kernels.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "cpu/isa.h"

namespace bert_unpad {

// Activations are [rows, hidden], contiguous; the bias is fp32, padded to whole vectors.
struct GeluCpuParams {
  DType dtype;
  bool tanh;
  int64_t hidden;
  const void *x, *dy;
  const float* bias;
  void* out;  // y in the forward pass, dx in the backward pass
};

struct GeluKernels {
  void (*forward)(const GeluCpuParams&, int64_t begin, int64_t end);  // rows [begin, end)
  // Also writes to dbias (padded) the column sums of these rows of dx; null: not wanted.
  void (*backward)(const GeluCpuParams&, int64_t begin, int64_t end, float* dbias);
};
BU_ISA_TABLE(GeluKernels, gelu_kernels)

}  // namespace bert_unpad
