// Compression to signs on a GPU: what the binding hands to the kernels. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace bert_unpad::cuda {

// As in csrc/sign_compress/sign_compress.h.
struct SignCudaParams {
  DType dtype;
  int64_t size;
  const void* value;
  float* error;
  uint8_t* bits;
  float* scale;
  const float* guard;  // where it is not finite, nothing changes; null: no guard
  float* partials;     // [sign_blocks(size)]: scratch memory of sign_scale
};

struct SignMeanCudaParams {
  const uint8_t* bits;  // [rows, stride]
  int64_t rows, stride, size;
  const float* scales;  // [rows]
  float* out;
  float factor;  // of all scales
  bool add;
  bool rows_follow;  // rows are parts of `out`, one after the other; else each is all of it
  const float* guard;
};

int64_t sign_blocks(int64_t size);

// scale = sqrt(sum of squares / size). No atomics: the same inputs give the same bits on the same
// device.
void sign_scale(const SignCudaParams& p, cudaStream_t stream);
void sign_pack(const SignCudaParams& p, cudaStream_t stream);
void sign_mean(const SignMeanCudaParams& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
