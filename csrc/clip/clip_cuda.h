// Clipping of a gradient bucket on a GPU: what the binding hands to the kernels. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace bert_unpad::cuda {

// As in csrc/clip/clip.h, and what the coefficient is made of. The dtypes are equal, or one of them
// is fp32.
struct ClipCudaParams {
  DType dtype, out_dtype;
  int64_t size;
  const void* bucket;
  void* out;
  float* residual;     // null where there is none
  const float* bound;  // a factor of max_norm, or null
  float max_norm, factor;
  float* partials;  // [clip_blocks(...)]: scratch memory
  float* norm;      // [1]
};

// Blocks of both kernels, which is the length of `partials`. Needs all but partials and norm.
int64_t clip_blocks(const ClipCudaParams& p);

// norm = ||bucket + residual||; out = min(1, bound / norm) * factor * (bucket + residual). No
// atomics: the same inputs give the same bits on the same device.
void clip_bucket(const ClipCudaParams& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
