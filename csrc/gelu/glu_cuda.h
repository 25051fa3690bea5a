// Gated linear units on a GPU: what the binding hands to the kernels. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"
#include "cuda/column_scratch.h"
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
  float* partials;  // [rows of glu_scratch(...), 2 * width]: scratch memory of dbias
  uint32_t* tickets;
};

void glu(const GluCudaParams& p, cudaStream_t stream);

// What `partials` and `tickets` are. Needs dtype, rows, width, and the activations' pointers.
ColumnScratch glu_scratch(const GluCudaParams& p);

// dx, and dbias = the columns' sums of dx before rounding. No atomic sums: the same inputs give the
// same bits on the same device.
void glu_backward(const GluCudaParams& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
