// One layer of an encoder, forward only: what the binding hands to the CPU kernels. No torch here.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "cpu/isa.h"
#include "gelu/glu_kind.h"

namespace bert_unpad {

// Weights in 8 bits: of each output column c scales[c] * (a whole number from -127 to 127). Panels
// of 64 columns, [columns / 64][depth / 4][64][4]; columns beyond the last are zero.
inline constexpr int kInt8Panel = 64;

struct Int8Weights {
  const int8_t* panels;
  const float* scales;  // [columns to 64]
  const int32_t* sums;  // [columns to 64]: of the whole numbers of a column
};

// Rows in 8 bits: element k of row r is scales[r] * (data[r * depth + k] - zeros[r]). A row that is
// not finite has NaN for its scale.
struct Int8Rows {
  uint8_t* data;
  float* scales;
  int32_t* zeros;
};

// y = x weight^T + bias (+ addend). The depth is a multiple of 4, columns of 32.
struct Int8ProductParams {
  bool dot_products;  // whether the CPU has instructions for them
  int64_t depth;
  Int8Rows x;
  Int8Weights weight;
  const float* bias;
  const float* addend;  // null: none; rows addend_stride apart
  int64_t addend_stride;
  float* y;  // rows y_stride apart
  int64_t y_stride;
};

// The same of bf16 numbers: x [rows + 16, depth], rows after the last of any value; weights in
// panels of 16 columns (cpu/gemm_bf16.h). The depth and columns are multiples of 32.
struct Bf16ProductParams {
  int64_t depth;
  const bf16 *x, *panels;
  const float* bias;
  const float* addend;  // null: none; rows addend_stride apart
  int64_t addend_stride;
  float* y;  // rows y_stride apart
  int64_t y_stride;
  float* sums;  // scratch memory: the rows of a block to 16, times its columns; not read by tiles
};

struct Bf16ProductKernels {
  // Rounds rows of `depth` numbers that are x_stride and out_stride apart.
  void (*round)(const float* x, int64_t x_stride, int64_t rows, int64_t depth, bf16* out,
                int64_t out_stride);
  void (*widen)(const bf16* x, int64_t numbers, float* out);
  void (*product)(const Bf16ProductParams&, int64_t row, int64_t rows, int64_t column,
                  int64_t columns);
  // That of 8 bits by AMX's tiles, of depths that are multiples of 64; null on other CPUs. It reads
  // rows to 16.
  void (*int8_product)(const Int8ProductParams&, int64_t row, int64_t rows, int64_t column,
                       int64_t columns);
};
BU_BF16_TABLE(Bf16ProductKernels, bf16_product_kernels)

struct EncoderKernels {
  // Rounds rows of `depth` numbers that are x_stride apart.
  void (*quantize)(const float* x, int64_t x_stride, int64_t rows, int64_t depth, Int8Rows out);
  // A block of at most kInt8Panel columns within one panel.
  void (*product)(const Int8ProductParams&, int64_t row, int64_t rows, int64_t column,
                  int64_t columns);
  // y = activation(y), times the gate where there is one; columns are a multiple of 16. `rough`: to
  // 3e-5, for what is rounded to 8 bits next.
  void (*activate)(GluKind kind, bool rough, float* y, int64_t y_stride, const float* gate,
                   int64_t gate_stride, int64_t rows, int64_t columns);
};
BU_ISA_TABLE(EncoderKernels, encoder_kernels)

}  // namespace bert_unpad
