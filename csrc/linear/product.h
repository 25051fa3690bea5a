// Our own product of a linear layer on a CPU in fp32, y = x weight^T (+ bias) (+ addend): what the
// binding hands to the kernels. No torch here.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace bert_unpad {

// `depth` and `columns` are multiples of 32; rows need not be.
struct ProductCpuParams {
  const float* x;  // [rows, depth], x_stride floats from row to row
  int64_t x_stride, rows, depth, columns;
  const float* weight;         // of each column of y `depth` numbers
  int64_t weight_stride;       // from one column to the next, or from one number to the next:
  bool transposed;             // the numbers of a column are weight_stride apart, columns 1
  const float *bias, *addend;  // addend: [rows, columns]
  float* y;                    // [rows, columns], y_stride floats from row to row
  int64_t y_stride;
  // The weights of columns from `first` on, packed for the product (cpu/gemm_simd.h).
  float* panels;
  int64_t first;
};

struct ProductKernels {
  int64_t panel, rows, few_rows;  // columns of a panel, most rows of a block, and see below
  // Packs the weights of the panel that begins with this column.
  void (*pack)(const ProductCpuParams&, int64_t column);
  // Computes a block of y from packed weights.
  void (*block)(const ProductCpuParams&, int64_t row, int64_t rows, int64_t column,
                int64_t columns);
  // Computes columns of y from weights as they are, not transposed, for `few_rows` rows at most:
  // packing them would take longer than the product.
  void (*narrow)(const ProductCpuParams&, int64_t column, int64_t columns);
};
BU_FP32_TABLE(ProductKernels, product_kernels)

}  // namespace bert_unpad
