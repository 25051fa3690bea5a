// Rotary position embeddings: what the binding hands to the CPU kernel.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "cpu/isa.h"
#include "rotary/angles.h"

namespace bert_unpad {

// Element (t, h, d) of x lies at x + t * x_token_stride + h * x_head_stride + d, in elements; of
// `out`, which may be x, likewise.
struct RotaryCpuParams {
  DType dtype;
  bool interleaved;
  bool wide_positions;  // int64, else int32
  int64_t heads, pairs;
  const void* positions;  // [tokens]
  const void* x;
  int64_t x_token_stride, x_head_stride;
  void* out;
  int64_t out_token_stride, out_head_stride;
  // Both halves of the steps of all pairs, padded with zeros. Interleaved, every pair has two, of
  // which the first goes backwards: so its sine is that by which the second element is multiplied.
  uint32_t step_low[2 * kMaxRotaryPairs], step_high[2 * kMaxRotaryPairs];
};

struct RotaryKernels {
  // Rotates the first `pairs` pairs of the first `heads` heads of tokens [begin, end).
  void (*rotate)(const RotaryCpuParams&, int64_t begin, int64_t end);
};
BU_ISA_TABLE(RotaryKernels, rotary_kernels)

}  // namespace bert_unpad
