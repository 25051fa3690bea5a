// gelu(x + bias) on a GPU: what the binding hands to the kernels. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace bert_unpad::cuda {

// Activations are [rows, columns], contiguous, of `dtype`; bias [columns] of `bias_dtype`.
struct GeluCudaParams {
  DType dtype, bias_dtype;
  int64_t rows, columns;
  const void* x;
  const void* bias;  // null where there is none
  const void* dy;
  void *y, *dx;
  void* dbias;      // null where there is no bias
  float* partials;  // [bias_gelu_partial_rows(...), columns]: scratch memory of dbias
  bool tanh;
};

void bias_gelu(const GeluCudaParams& p, cudaStream_t stream);

// Rows of `partials`. Needs dtype, rows, columns, and the activations' pointers.
int64_t bias_gelu_partial_rows(const GeluCudaParams& p);

// dx = dy * gelu'(x + bias) and dbias = the columns' sums of dx before rounding. No atomics: the
// same inputs give the same bits on the same device.
void bias_gelu_backward(const GeluCudaParams& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
