// Products of bf16 numbers with fp32 sums, and the rounding of their inputs; of 8 bits by tiles.
#include "encoder/layer.h"

#include "cpu/gemm_bf16.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

void round_rows(const float* x, int64_t x_stride, int64_t rows, int64_t depth, bf16* out,
                int64_t out_stride) {
  for (int64_t row = 0; row < rows; ++row, x += x_stride, out += out_stride)
    for (int64_t k = 0; k < depth; k += kLanes) store(out + k, load(x + k));
}

void widen(const bf16* x, int64_t numbers, float* out) {
  for (int64_t i = 0; i < numbers; i += kLanes) store(out + i, load(x + i));
}

// Writes a block of y: values(row, column), of kLanes columns each, bias and addend. Both count
// from the block's first.
template <class Params, class F>
BU_INLINE void finish(const Params& p, int64_t row, int64_t rows, int64_t column, int64_t columns,
                      const F& values) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* addend = p.addend ? p.addend + (row + i) * p.addend_stride + column : nullptr;
    float* y = p.y + (row + i) * p.y_stride + column;
    for (int64_t j = 0; j < columns; j += kLanes) {
      f32v v = values(i, j) + load(p.bias + column + j);
      if (addend) v += load(addend + j);
      store(y + j, v);
    }
  }
}

#if defined(BU_AMX)

// Blocks of sums stay in the first-level cache until they are finished.
constexpr int kSide = 32;

// fn(row, rows, column) for each block of kSide columns and at most as many rows.
template <class F>
BU_INLINE void for_blocks(int64_t row, int64_t rows, int64_t column, int64_t columns, const F& fn) {
  for (const int64_t end = row + rows; row < end; row += kSide)
    for (int64_t c = column; c < column + columns; c += kSide)
      fn(row, end - row < kSide ? end - row : kSide, c);
}

void product(const Bf16ProductParams& p, int64_t row, int64_t rows, int64_t column,
             int64_t columns) {
  const TileRegisters tiles;
  alignas(64) float sums[kSide * kSide];
  for_blocks(row, rows, column, columns, [&](int64_t first, int64_t count, int64_t c) {
    gemm_bf16(Bf16Rows(p.x + first * p.depth, p.depth), count > 16 ? 32 : 16,
              {p.panels + c * p.depth, kPairColumns * p.depth}, kSide, static_cast<int>(p.depth),
              sums, kSide, false);
    finish(p, first, count, c, kSide,
           [&](int64_t i, int64_t j) { return load(sums + i * kSide + j); });
  });
}

// Sums of 8-bit products of 16 kRows rows and kSide columns, for kInt8Panel columns a row.
template <int kRows>
BU_INLINE void int8_block(const uint8_t* x, int64_t depth, const int8_t* weights, int32_t* sums) {
  constexpr int64_t kStep = 64, kFours = 4 * kInt8Panel;  // bytes of a row of fours
  tile_zero<0>();
  tile_zero<1>();
  if constexpr (kRows == 2) {
    tile_zero<2>();
    tile_zero<3>();
  }
  for (int64_t k = 0; k < depth; k += kStep, weights += kStep / 4 * kFours) {
    tile_load<4>(x + k, depth);
    tile_load<6>(weights, kFours);
    tile_multiply_bytes<0, 4, 6>();
    tile_load<7>(weights + 64, kFours);
    tile_multiply_bytes<1, 4, 7>();
    if constexpr (kRows == 2) {
      tile_load<5>(x + 16 * depth + k, depth);
      tile_multiply_bytes<2, 5, 6>();
      tile_multiply_bytes<3, 5, 7>();
    }
  }
  tile_store<0>(sums, 4 * kSide);
  tile_store<1>(sums + 16, 4 * kSide);
  if constexpr (kRows == 2) {
    tile_store<2>(sums + 16 * kSide, 4 * kSide);
    tile_store<3>(sums + 16 * kSide + 16, 4 * kSide);
  }
}

void int8_product(const Int8ProductParams& p, int64_t row, int64_t rows, int64_t column,
                  int64_t columns) {
  const TileRegisters tiles;
  alignas(64) int32_t sums[kSide * kSide];
  const int8_t* panel = p.weight.panels + column / kInt8Panel * kInt8Panel * p.depth;
  for_blocks(row, rows, column, columns, [&](int64_t first, int64_t count, int64_t c) {
    (count > 16 ? int8_block<2> : int8_block<1>)(p.x.data + first * p.depth, p.depth,
                                                 panel + c % kInt8Panel * 4, sums);
    finish(p, first, count, c, kSide, [&](int64_t i, int64_t j) {
      const i32v sum = load_bits<i32v>(sums + i * kSide + j) -
                       load_bits<i32v>(p.weight.sums + c + j) * p.x.zeros[first + i];
      return __builtin_convertvector(sum, f32v) *
             (load(p.weight.scales + c + j) * splat(p.x.scales[first + i]));
    });
  });
}

#else

constexpr int kPieceDepth = 384;  // of a piece, whose panels stay in the first-level cache

void product(const Bf16ProductParams& p, int64_t row, int64_t rows, int64_t column,
             int64_t columns) {
  const bf16* panels = p.panels + column * p.depth;
  const int height = static_cast<int>((rows + 15) / 16 * 16);
  for (int64_t k = 0; k < p.depth; k += kPieceDepth) {
    const int depth = static_cast<int>(p.depth - k < kPieceDepth ? p.depth - k : kPieceDepth);
    gemm_bf16(Bf16Rows(p.x + row * p.depth + k, p.depth), height,
              {panels + k * kPairColumns, kPairColumns * p.depth}, static_cast<int>(columns), depth,
              p.sums, columns, k > 0);
  }
  finish(p, row, rows, column, columns,
         [&](int64_t i, int64_t j) { return load(p.sums + i * columns + j); });
}

constexpr decltype(Bf16ProductKernels::int8_product) int8_product = nullptr;

#endif

}  // namespace

extern const Bf16ProductKernels bf16_product_kernels = {round_rows, widen, product, int8_product};

}  // namespace bert_unpad::BERT_UNPAD_ISA
