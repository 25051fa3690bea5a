// The second stage of every column reduction: gradients of biases and LayerNorm parameters are
// first summed over runs of rows into an fp32 matrix, then over the rows of that matrix.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "common/types.h"

namespace bert_unpad::cuda {

// out[j] = sum over i of partials[i * columns + j], in a fixed order; zeros for no rows. `out` has
// dtype `out_dtype`.
struct ColumnSum {
  const float* partials;
  void* out;
  DType out_dtype;
};

// Up to kMaxColumnSums matrices of one shape in one launch: the sums of a backward pass take less
// time than starting a kernel for each. Those with a null `out` are left out. `op` names the
// operator in error messages.
inline constexpr int kMaxColumnSums = 3;
void column_sums(const char* op, std::initializer_list<ColumnSum> sums, int64_t rows,
                 int64_t columns, cudaStream_t stream);

inline void column_sum(const char* op, const float* partials, int64_t rows, int64_t columns,
                       void* out, DType out_dtype, cudaStream_t stream) {
  column_sums(op, {{partials, out, out_dtype}}, rows, columns, stream);
}

}  // namespace bert_unpad::cuda
