// A product of bf16 matrices with fp32 sums, C (+)= A B, for the instruction sets that multiply
// bf16: by AMX tiles where BU_AMX is defined, else by dot products of pairs (AVX512-BF16, or NEON's
// BFDOT). It does no blocking for caches.
//
// A is stored row by row or in tiles (see Bf16Rows). B is stored in panels of 16 columns; in a
// panel, each pair of rows 2k, 2k + 1 is stored as 16 columns of two numbers, as both kinds of
// instruction read it: [columns / 16][depth / 2][16][2]. Rows and columns are multiples of 16, the
// depth of 32.
#pragma once

#include "cpu/pairs_simd.h"
#if defined(BU_AMX)
#include "cpu/tiles.h"
#endif

namespace bert_unpad::BERT_UNPAD_ISA {

inline constexpr int kPairColumns = 16;  // of a panel

// --- packing
// ---------------------------------------------------------------------------------------

// Copies rows, with zeros from `columns` to `width` (a multiple of 32) and from `rows` to `height`.
inline void copy_rows(const bf16* x, int64_t stride, int rows, int columns, int height, int width,
                      bf16* out) {
  for (int i = 0; i < height; ++i, x += stride, out += width)
    for (int c = 0; c < width; c += 32)
      store_bits(out + c, i < rows ? load_first(x + c, first_columns(columns - c)) : Words{});
}

// Packs x [rows, columns] as a B whose depth runs over the rows; what is missing up to `depth`
// (a multiple of 32) rows and whole panels is zero.
inline void pack_pairs(const bf16* x, int64_t stride, int rows, int columns, int depth, bf16* out) {
  for (int c = 0; c < columns; c += kPairColumns) {
    const uint32_t mask = first_columns(columns - c);
    for (int i = 0; i < depth; i += 2, out += 2 * kPairColumns) {
      const bf16* row = x + i * stride + c;
      store_bits(out,
                 load_pairs(row, i < rows ? mask : 0u, row + stride, i + 1 < rows ? mask : 0u));
    }
  }
}

// Packs the transpose of x [rows, columns] as a B whose depth runs over the columns; what is
// missing up to `width` (a multiple of 16) rows and `depth` (of 32) columns is zero.
inline void pack_pairs_transposed(const bf16* x, int64_t stride, int rows, int columns, int width,
                                  int depth, bf16* out) {
  for (int row = 0; row < width; row += kPairColumns)
    for (int c = 0; c < depth; c += 32, out += 32 * kPairColumns) {
      const uint32_t mask = first_columns(columns - c);
      Words r[16];
      for (int i = 0; i < 16; ++i)
        r[i] = row + i < rows ? load_first(x + (row + i) * stride + c, mask) : Words{};
      transpose16(r);
      for (int i = 0; i < 16; ++i) store_bits(out + 2 * kPairColumns * i, r[i]);
    }
}

// --- product
// ---------------------------------------------------------------------------------------

// Element (i, k) of A at p + i / 16 * block + i % 16 * row + k / 32 * step + k % 32.
struct Bf16Rows {
  const bf16* p;
  int64_t row, block, step;
  Bf16Rows(const bf16* rows, int64_t stride) : p(rows), row(stride), block(16 * stride), step(32) {}
  // A stored in tiles of 16 rows of 32: tiles of the same rows one after the other, `stride`
  // numbers from 16 rows to the next 16.
  static Bf16Rows tiles(const bf16* p, int64_t stride) {
    Bf16Rows a(p, 32);
    a.block = stride;
    a.step = 512;
    return a;
  }
};
struct Bf16Panels {
  const bf16* p;
  int64_t stride;  // from panel to panel
};

#if defined(BU_AMX)

// (16 kRows) x (16 kColumns) numbers of C.
template <int kRows, int kColumns>
BU_INLINE void gemm_block(Bf16Rows a, Bf16Panels b, int depth, float* c, int64_t ldc,
                          bool accumulate) {
  const int64_t c_bytes = 4 * ldc, a_bytes = 2 * a.row;
  if (accumulate) {
    tile_load<0>(c, c_bytes);
    if constexpr (kColumns == 2) tile_load<1>(c + 16, c_bytes);
    if constexpr (kRows == 2) tile_load<2>(c + 16 * ldc, c_bytes);
    if constexpr (kRows == 2 && kColumns == 2) tile_load<3>(c + 16 * ldc + 16, c_bytes);
  } else {
    tile_zero<0>();
    if constexpr (kColumns == 2) tile_zero<1>();
    if constexpr (kRows == 2) tile_zero<2>();
    if constexpr (kRows == 2 && kColumns == 2) tile_zero<3>();
  }
  for (int k = 0; k < depth; k += 32, a.p += a.step) {
    tile_load<4>(a.p, a_bytes);
    tile_load<6>(b.p + k * kPairColumns, 64);
    tile_multiply<0, 4, 6>();
    if constexpr (kColumns == 2) {
      tile_load<7>(b.p + b.stride + k * kPairColumns, 64);
      tile_multiply<1, 4, 7>();
    }
    if constexpr (kRows == 2) {
      tile_load<5>(a.p + a.block, a_bytes);
      tile_multiply<2, 5, 6>();
      if constexpr (kColumns == 2) tile_multiply<3, 5, 7>();
    }
  }
  tile_store<0>(c, c_bytes);
  if constexpr (kColumns == 2) tile_store<1>(c + 16, c_bytes);
  if constexpr (kRows == 2) tile_store<2>(c + 16 * ldc, c_bytes);
  if constexpr (kRows == 2 && kColumns == 2) tile_store<3>(c + 16 * ldc + 16, c_bytes);
}

template <int kColumns>
inline void gemm_columns(Bf16Rows a, int rows, Bf16Panels b, int depth, float* c, int64_t ldc,
                         bool accumulate) {
  for (; rows >= 32; rows -= 32, a.p += 2 * a.block, c += 32 * ldc)
    gemm_block<2, kColumns>(a, b, depth, c, ldc, accumulate);
  if (rows > 0) gemm_block<1, kColumns>(a, b, depth, c, ldc, accumulate);
}

// TileRegisters must be alive.
inline void gemm_bf16(Bf16Rows a, int rows, Bf16Panels b, int columns, int depth, float* c,
                      int64_t ldc, bool accumulate) {
  for (; columns >= 32; columns -= 32, b.p += 2 * b.stride, c += 32)
    gemm_columns<2>(a, rows, b, depth, c, ldc, accumulate);
  if (columns > 0) gemm_columns<1>(a, rows, b, depth, c, ldc, accumulate);
}

#else

#if defined(__AVX512F__)
inline constexpr int kBlockRows = 8, kBlockPanels = 3;
// sum + the dot products of the pair with the pairs of the columns.
BU_INLINE f32v dot(f32v sum, int32_t pair, const bf16* columns) {
  return (f32v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair),
                                (__m512bh)load_bits<__m512i>(columns));
}
#else
inline constexpr int kBlockRows = 4, kBlockPanels = 1;
BU_INLINE f32v dot(f32v sum, int32_t pair, const bf16* columns) {
  return (f32v)vbfdotq_lane_f32((float32x4_t)sum, load_bits<bfloat16x8_t>(columns),
                                vreinterpret_bf16_s32(int32x2_t{pair, 0}), 0);
}
#endif

// kBlockRows rows of kPanels panels.
template <int kPanels>
BU_INLINE void gemm_block(Bf16Rows a, Bf16Panels b, int depth, float* c, int64_t ldc,
                          bool accumulate) {
  constexpr int kColumns = kPanels * kVectors;
  f32v sums[kBlockRows][kColumns];
#pragma GCC unroll 8
  for (int i = 0; i < kBlockRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j)
      sums[i][j] = accumulate ? load(c + i * ldc + kLanes * j) : f32v{};
  for (int step = 0; step < depth; step += 32, a.p += a.step)
    for (int k = 0; k < 32; k += 2, b.p += 2 * kPairColumns)
#pragma GCC unroll 8
      for (int i = 0; i < kBlockRows; ++i) {
        const auto pair = load_bits<int32_t>(a.p + i * a.row + k);
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; ++j)
          sums[i][j] =
              dot(sums[i][j], pair, b.p + j / kVectors * b.stride + j % kVectors * 2 * kLanes);
      }
#pragma GCC unroll 8
  for (int i = 0; i < kBlockRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) store(c + i * ldc + kLanes * j, sums[i][j]);
}

template <int kPanels>
inline void gemm_columns(Bf16Rows a, int rows, Bf16Panels b, int depth, float* c, int64_t ldc,
                         bool accumulate) {
  for (; rows > 0; rows -= 16, a.p += a.block)
    for (int i = 0; i < 16; i += kBlockRows, c += kBlockRows * ldc) {
      Bf16Rows block = a;
      block.p += i * a.row;
      gemm_block<kPanels>(block, b, depth, c, ldc, accumulate);
    }
}

inline void gemm_bf16(Bf16Rows a, int rows, Bf16Panels b, int columns, int depth, float* c,
                      int64_t ldc, bool accumulate) {
  constexpr int kStep = kBlockPanels * kPairColumns;
  for (; columns >= kStep; columns -= kStep, b.p += kBlockPanels * b.stride, c += kStep)
    gemm_columns<kBlockPanels>(a, rows, b, depth, c, ldc, accumulate);
  if constexpr (kBlockPanels == 3) {
    if (columns == 2 * kPairColumns)
      gemm_columns<2>(a, rows, b, depth, c, ldc, accumulate);
    else if (columns > 0)
      gemm_columns<1>(a, rows, b, depth, c, ldc, accumulate);
  }
}

// Where AMX needs its registers set up, nothing.
struct TileRegisters {
  TileRegisters() {}
  ~TileRegisters() {}
};

#endif

}  // namespace bert_unpad::BERT_UNPAD_ISA
