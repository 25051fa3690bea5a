// The sum of a matrix's rows by a separate kernel. Kernels that end with column sums over their
// blocks do without it (cuda/last_block.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace bert_unpad::cuda {

// out[j] = sum over i of x[i * columns + j], in fp32 and a fixed order; zeros for no rows. x has
// dtype `dtype`, `out` has `out_dtype`. `op` names the operator in error messages.
void column_sum(const char* op, const void* x, DType dtype, int64_t rows, int64_t columns,
                void* out, DType out_dtype, cudaStream_t stream);

}  // namespace bert_unpad::cuda
