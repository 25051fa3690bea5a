// The second stage of every column reduction: gradients of biases and LayerNorm parameters are
// first summed over runs of rows into an fp32 matrix, then over the rows of that matrix.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cpu/types.h"

namespace bert_unpad::cuda {

// out[j] = sum over i of partials[i * columns + j], in a fixed order; zeros for no rows. `out` has
// dtype `out_dtype`. `op` names the operator in error messages.
void column_sum(const char* op, const float* partials, int64_t rows, int64_t columns, void* out,
                DType out_dtype, cudaStream_t stream);

}  // namespace bert_unpad::cuda
