// gelu(x + bias) on a GPU: what the binding hands to the kernels. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"
#include "cuda/column_scratch.h"

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
  float* partials;  // [rows of bias_gelu_scratch(...), columns]: scratch memory of dbias
  uint32_t* tickets;
  bool tanh;
};

void bias_gelu(const GeluCudaParams& p, cudaStream_t stream);

// What `partials` and `tickets` are. Needs dtype, rows, columns, and the activations' pointers.
ColumnScratch bias_gelu_scratch(const GeluCudaParams& p);

// dx = dy * gelu'(x + bias) and dbias = the columns' sums of dx before rounding. No atomic sums:
// the same inputs give the same bits on the same device.
void bias_gelu_backward(const GeluCudaParams& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
