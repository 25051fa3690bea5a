// LN(residual + dropout(x + x_bias)) on a GPU, LayerNorm or RMSNorm: what the binding hands to the
// kernels. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/column_scratch.h"
#include "cuda/fp8_result.h"
#include "cuda/norm_row_params.h"

namespace bert_unpad::cuda {

// Activations are [rows, hidden], contiguous, of `norm.dtype`.
struct NormCudaParams {
  static constexpr int kRowOperands = 2;      // tensors that a row is made of
  static constexpr bool kCopiedAhead = true;  // a row, while the one before it is worked on
  RowNormParams norm;
  DType x_bias_dtype;
  bool of_sum;  // in the backward pass: x is the sum that the forward pass returned
  const void* x;
  const void *x_bias, *residual;  // null where there is none
  const void* dsum;               // null where there is none
  void *y, *dx;
  void* sum;        // null where it is not wanted
  void* dresidual;  // null where it equals dx or is not wanted
  void* dx_bias;    // null where there is no x_bias
};

void dropout_add_layer_norm(const NormCudaParams& p, cudaStream_t stream);

// `fp8` has the rows and columns of y, its columns a multiple of 16.
struct NormFp8Params : NormCudaParams {
  Fp8Result fp8;
  const float* scale;  // what fp8.q is to be multiplied with
  float* largest;      // [kFp8Largest]; null: not wanted
};

// The same, and what quantize_fp8_scaled (cuda/fp8_scaled.h) makes of y, in E4M3 and bit for bit.
// One kernel where a warp holds a row, else two.
void dropout_add_layer_norm_fp8(const NormFp8Params& p, cudaStream_t stream);

// What `norm.partials`, of 3 sums, and `norm.tickets` are. Needs the sizes and the activations'
// pointers.
ColumnScratch dropout_add_layer_norm_scratch(const NormCudaParams& p);

// No atomic sums: the same inputs give the same bits on the same device.
void dropout_add_layer_norm_backward(const NormCudaParams& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
