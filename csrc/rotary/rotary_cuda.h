// Rotary position embeddings on a GPU: what the binding hands to the kernel. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"
#include "rotary/angles.h"

namespace bert_unpad::cuda {

// Element (t, h, d) of x lies at x + t * x_token_stride + h * x_head_stride + d, in elements; of
// `out`, which may be x, likewise.
struct RotaryCudaParams {
  DType dtype;
  bool interleaved;
  bool wide_positions;  // int64, else int32
  int64_t tokens, heads, pairs;
  const void* positions;  // [tokens]
  const void* x;
  int64_t x_token_stride, x_head_stride;
  void* out;
  int64_t out_token_stride, out_head_stride;
  uint64_t steps[kMaxRotaryPairs];
};

// Rotates the first `pairs` pairs of the first `heads` heads.
void rotary(const RotaryCudaParams& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
