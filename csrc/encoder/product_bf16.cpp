// Products of bf16 numbers with fp32 sums, and the rounding of their inputs; of 8 bits by tiles.
#include "encoder/layer.h"

#include "cpu/gemm_bf16.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

#if defined(BU_AMX)
constexpr int kPieceDepth = 1 << 20;  // sums stay in the tiles' registers
#else
constexpr int kPieceDepth = 384;  // of a piece, whose panels stay in the first-level cache
#endif

void round_rows(const float* x, int64_t x_stride, int64_t rows, int64_t depth, bf16* out) {
  for (int64_t row = 0; row < rows; ++row, x += x_stride, out += depth)
    for (int64_t k = 0; k < depth; k += kLanes) store(out + k, load(x + k));
}

void product(const Bf16ProductParams& p, int64_t row, int64_t rows, int64_t column,
             int64_t columns) {
  const TileRegisters tiles;
  const bf16* panels = p.panels + column * p.depth;
  const int height = static_cast<int>((rows + 15) / 16 * 16);
  for (int64_t k = 0; k < p.depth; k += kPieceDepth) {
    const int depth = static_cast<int>(p.depth - k < kPieceDepth ? p.depth - k : kPieceDepth);
    gemm_bf16(Bf16Rows(p.x + row * p.depth + k, p.depth), height,
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

#if defined(BU_AMX)

// (16 kRows) x (16 kColumns) sums of 8-bit products, for kInt8Panel columns a row.
template <int kRows, int kColumns>
BU_INLINE void int8_block(const Int8ProductParams& p, const uint8_t* x, const int8_t* weights,
                          int32_t* sums, int64_t columns) {
  constexpr int64_t kStep = 64, kFours = 4 * kInt8Panel;  // bytes of a row of fours
  tile_zero<0>();
  if constexpr (kColumns == 2) tile_zero<1>();
  if constexpr (kRows == 2) tile_zero<2>();
  if constexpr (kRows == 2 && kColumns == 2) tile_zero<3>();
  for (int64_t k = 0; k < p.depth; k += kStep) {
    const int8_t* b = weights + k / 4 * kFours;
    tile_load<4>(x + k, p.depth);
    tile_load<6>(b, kFours);
    tile_multiply_bytes<0, 4, 6>();
    if constexpr (kColumns == 2) {
      tile_load<7>(b + 64, kFours);
      tile_multiply_bytes<1, 4, 7>();
    }
    if constexpr (kRows == 2) {
      tile_load<5>(x + 16 * p.depth + k, p.depth);
      tile_multiply_bytes<2, 5, 6>();
      if constexpr (kColumns == 2) tile_multiply_bytes<3, 5, 7>();
    }
  }
  tile_store<0>(sums, 4 * columns);
  if constexpr (kColumns == 2) tile_store<1>(sums + 16, 4 * columns);
  if constexpr (kRows == 2) tile_store<2>(sums + 16 * columns, 4 * columns);
  if constexpr (kRows == 2 && kColumns == 2) tile_store<3>(sums + 16 * columns + 16, 4 * columns);
}

template <int kColumns>
void int8_rows(const Int8ProductParams& p, int64_t row, int64_t rows, const int8_t* weights,
               int32_t* sums, int64_t columns) {
  const uint8_t* x = p.x.data + row * p.depth;
  int64_t i = 0;
  for (; i + 16 < rows; i += 32)
    int8_block<2, kColumns>(p, x + i * p.depth, weights, sums + i * columns, columns);
  if (i < rows) int8_block<1, kColumns>(p, x + i * p.depth, weights, sums + i * columns, columns);
}

void int8_product(const Int8ProductParams& p, int64_t row, int64_t rows, int64_t column,
                  int64_t columns) {
  const TileRegisters tiles;
  const int8_t* panel = p.weight.panels + column / kInt8Panel * kInt8Panel * p.depth;
  const auto weights = [&](int64_t j) { return panel + (column + j) % kInt8Panel * 4; };
  int64_t j = 0;
  for (; j + 32 <= columns; j += 32) int8_rows<2>(p, row, rows, weights(j), p.sums + j, columns);
  if (j < columns) int8_rows<1>(p, row, rows, weights(j), p.sums + j, columns);
  for (int64_t i = 0; i < rows; ++i)
    for (j = 0; j < columns; j += kLanes) {
      const int64_t c = column + j;
      const i32v sum = load_bits<i32v>(p.sums + i * columns + j) -
                       load_bits<i32v>(p.weight.sums + c) * p.x.zeros[row + i];
      const f32v scale = load(p.weight.scales + c) * splat(p.x.scales[row + i]);
      f32v y = __builtin_convertvector(sum, f32v) * scale + load(p.bias + c);
      if (p.addend) y += load(p.addend + (row + i) * p.addend_stride + c);
      store(p.y + (row + i) * p.y_stride + c, y);
    }
}

#else
constexpr decltype(Bf16ProductKernels::int8_product) int8_product = nullptr;
#endif

}  // namespace

extern const Bf16ProductKernels bf16_product_kernels = {round_rows, product, int8_product};

}  // namespace bert_unpad::BERT_UNPAD_ISA
