// Products of bf16 numbers with fp32 sums, and the rounding of their inputs.
#include "encoder/layer.h"

#include "cpu/gemm_bf16.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

#if defined(BU_AMX)
constexpr int kDepth = 1 << 20;  // sums stay in the tiles' registers
#else
constexpr int kDepth = 384;  // of a piece, whose panels stay in the first-level cache
#endif

void round_rows(const float* x, int64_t x_stride, int64_t rows, int64_t depth, bf16* out) {
  for (int64_t row = 0; row < rows; ++row, x += x_stride, out += depth)
    for (int64_t k = 0; k < depth; k += kLanes) store(out + k, load(x + k));
}

void product(const Bf16ProductParams& p, int64_t row, int64_t rows, int64_t column,
             int64_t columns) {
  const TileRegisters tiles;
  const bf16* panels = p.panels + column * p.depth;
  for (int64_t k = 0; k < p.depth; k += kDepth) {
    const int depth = static_cast<int>(p.depth - k < kDepth ? p.depth - k : kDepth);
    gemm_bf16(Bf16Rows(p.x + row * p.depth + k, p.depth), static_cast<int>(rows),
              {panels + k * kPairColumns, kPairColumns * p.depth}, static_cast<int>(columns), depth,
              p.sums, columns, k > 0);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const float* addend = p.addend ? p.addend + (row + i) * p.addend_stride + column : nullptr;
    float* y = p.y + (row + i) * p.y_stride + column;
    for (int64_t j = 0; j < columns; j += kLanes) {
      f32v v = load(p.sums + i * columns + j) + load(p.bias + column + j);
      if (addend) v += load(addend + j);
      store(y + j, v);
    }
  }
}

}  // namespace

extern const Bf16ProductKernels bf16_product_kernels = {round_rows, product};

}  // namespace bert_unpad::BERT_UNPAD_ISA
