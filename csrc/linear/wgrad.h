// The gradient of a linear layer's weight on a CPU, dweight [out, in] (+)= dy^T x, by our own
// product: what the binding hands to the kernels. No torch here.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "cpu/isa.h"

namespace bert_unpad {

// Sizes are multiples of 32; tokens need not be.
struct WgradCpuParams {
  const void *dy, *x;  // [tokens, out], [tokens, in], of one dtype
  int64_t tokens, out, in;
  float* dweight;
  bool accumulate;
  // Of bf16, scratch memory: dy^T in tiles of 16 x 32 and x in panels of 16 columns
  // (cpu/gemm_bf16.h), both with zeros after the tokens up to `depth`, a multiple of 32.
  int64_t depth;
  bf16 *dy_tiles, *x_panels;
};

// Rows and columns of dweight.
struct WgradBlock {
  int64_t row, rows, column, columns;
};

struct WgradBf16Kernels {
  int64_t size;  // most rows and columns of a block
  // Rearranges tokens [begin, end), multiples of 32. Writes the sums of dy's columns to `sums`
  // [out] where it is not null.
  void (*rearrange)(const WgradCpuParams&, int64_t begin, int64_t end, float* sums);
  void (*block)(const WgradCpuParams&, const WgradBlock&);
};
BU_BF16_TABLE(WgradBf16Kernels, wgrad_bf16_kernels)

struct WgradFp32Kernels {
  int64_t size, scratch;  // scratch: floats
  // Writes the sums of dy's columns of the block's rows to `sums` [out] where it is not null.
  void (*block)(const WgradCpuParams&, const WgradBlock&, float* sums, float* scratch);
};
BU_FP32_TABLE(WgradFp32Kernels, wgrad_fp32_kernels)

}  // namespace bert_unpad
