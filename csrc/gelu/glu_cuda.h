// Gated linear units on a GPU: what the binding hands to the kernels. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"
#include "gelu/glu_kind.h"

namespace bert_unpad::cuda {

// x and dx are [rows, 2 * width], y and dy [rows, width], contiguous, of `dtype`; bias [2 * width]
// of `bias_dtype`.
struct GluCudaParams {
  DType dtype, bias_dtype;
  GluKind kind;
  int64_t rows, width;
  const void* x;
  const void* bias;  // null where there is none
  const void* dy;
  void *y, *dx;
  void* dbias;      // null where there is no bias
  float* partials;  // [glu_partial_rows(...), 2 * width]: scratch memory of dbias
};

void glu(const GluCudaParams& p, cudaStream_t stream);

// Rows of `partials`. Needs dtype, rows, width, and the activations' pointers.
int64_t glu_partial_rows(const GluCudaParams& p);

// dx, and dbias = the columns' sums of dx before rounding. No atomics: the same inputs give the
// same bits on the same device.
void glu_backward(const GluCudaParams& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
