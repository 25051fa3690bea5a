// The gradient of a linear layer's weight on CPUs with AMX: what the binding hands to the kernels.
// No torch here.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace bert_unpad {

// dweight [out, in] (+)= dy^T x. Sizes are multiples of 32; tokens need not be.
struct WgradCpuParams {
  const bf16 *dy, *x;  // [tokens, out], [tokens, in]
  int64_t tokens, out, in;
  float* dweight;
  bool accumulate;
  // Scratch memory: dy^T in tiles of 16 x 32 and x in panels of 16 columns (cpu/gemm_bf16.h), both
  // with zeros after the tokens up to `depth`, a multiple of 32.
  int64_t depth;
  bf16 *dy_tiles, *x_panels;
};

struct WgradKernels {
  // Rearranges tokens [begin, end), multiples of 32. Writes the sums of dy's columns to `sums`
  // [out] where it is not null.
  void (*rearrange)(const WgradCpuParams&, int64_t begin, int64_t end, float* sums);
  // Computes dweight's rows [row, row + rows) and columns [column, column + columns).
  void (*block)(const WgradCpuParams&, int64_t row, int64_t rows, int64_t column, int64_t columns);
};

}  // namespace bert_unpad
