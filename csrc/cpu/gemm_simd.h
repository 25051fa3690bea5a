// A small fp32 matrix product for operands that sit in cache: C (+)= A B, where A is read element
// by element (any strides, so a transposed A costs nothing) and B is packed in panels of kPanel
// columns.
//
// An MR x NV tile of accumulators stays in registers: 6 x 4 vectors with 32 registers (24 + 4 + 1),
// 6 x 2 with 16. Tails run the same code with a smaller MR or NV, chosen at compile time.
#pragma once

#include "cpu/simd.h"
#if defined(__AVX512F__)
#include "cpu/pairs_simd.h"
#endif

namespace bert_unpad::BERT_UNPAD_ISA {

inline constexpr int kTileRows = 6;
inline constexpr int kTileVectors = kVectorRegisters == 32 ? 4 : 2;
inline constexpr int kPanel = kTileVectors * kLanes;  // columns of a panel of B

// A strided matrix of fp32 operands: element (i, k) at p[i * rows + k * columns].
struct Strided {
  const float* p;
  int64_t rows, columns;
};

// A packed B: panels of kPanel columns, `stride` floats from one to the next. A product may begin
// at any multiple of kLanes columns, and p at any row of the first panel.
struct Panels {
  const float* p;
  int64_t stride;
  int column = 0;
};

// Floats of B that are asked for ahead: the hardware's prefetchers stop at the end of a page. Where
// B comes from memory, as for a few rows, that takes a tenth less time; in cache it costs nothing.
inline constexpr int kAhead = 1024;

template <int MR, int NV>
BU_INLINE void tile(Strided a, int depth, const float* b, float* c, int64_t ldc, bool accumulate) {
  f32v acc[MR][NV];
#pragma GCC unroll 6
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) acc[i][j] = accumulate ? load(c + i * ldc + j * kLanes) : f32v{};
  const float* ap = a.p;
  for (int k = 0; k < depth; ++k, ap += a.columns, b += kPanel) {
    f32v bv[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      bv[j] = load(b + j * kLanes);
      __builtin_prefetch(b + j * kLanes + kAhead);
    }
#pragma GCC unroll 6
    for (int i = 0; i < MR; ++i) {
      const f32v av = splat(ap[i * a.rows]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] += av * bv[j];
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(c + i * ldc + j * kLanes, acc[i][j]);
}

template <int NV>
inline void tile_rows(Strided a, int rows, int depth, const float* b, float* c, int64_t ldc,
                      bool accumulate) {
  while (rows >= kTileRows) {
    tile<kTileRows, NV>(a, depth, b, c, ldc, accumulate);
    a.p += kTileRows * a.rows;
    c += kTileRows * ldc;
    rows -= kTileRows;
  }
  switch (rows) {
    case 5:
      return tile<5, NV>(a, depth, b, c, ldc, accumulate);
    case 4:
      return tile<4, NV>(a, depth, b, c, ldc, accumulate);
    case 3:
      return tile<3, NV>(a, depth, b, c, ldc, accumulate);
    case 2:
      return tile<2, NV>(a, depth, b, c, ldc, accumulate);
    case 1:
      return tile<1, NV>(a, depth, b, c, ldc, accumulate);
    default:
      return;
  }
}

// C [rows, columns rounded up to kLanes] (+)= A [rows, depth] B. B is [columns / kPanel][depth]
// [kPanel]; its padding columns up to a multiple of kLanes must hold finite numbers. ldc >= columns
// rounded up to kLanes.
inline void gemm(Strided a, int rows, int columns, int depth, Panels b, float* c, int64_t ldc,
                 bool accumulate) {
  const float* panel = b.p + b.column / kPanel * b.stride;
  int skip = b.column % kPanel;
  for (int column = 0; column < columns; panel += b.stride, skip = 0) {
    const int most = kPanel - skip, width = columns - column < most ? columns - column : most;
    const int left = (width + kLanes - 1) / kLanes;
    const float* bp = panel + skip;
    float* cp = c + column;
    if (left == kTileVectors) {
      tile_rows<kTileVectors>(a, rows, depth, bp, cp, ldc, accumulate);
    } else if (left == 1) {
      tile_rows<1>(a, rows, depth, bp, cp, ldc, accumulate);
    } else if constexpr (kTileVectors == 4) {
      if (left == 2)
        tile_rows<2>(a, rows, depth, bp, cp, ldc, accumulate);
      else
        tile_rows<3>(a, rows, depth, bp, cp, ldc, accumulate);
    }
    column += width;
  }
}

// Floats of a panel.
BU_INLINE int64_t panel_size(int depth) { return static_cast<int64_t>(depth) * kPanel; }

// Floats that a packed [depth, columns] operand takes.
inline int64_t packed_size(int depth, int columns) {
  return static_cast<int64_t>(depth) * round_up(columns, kPanel);
}

// Packs `rows` x `columns` (row stride in elements, times `factor`) as the B of a product whose
// depth runs over its rows.
template <class T>
inline void pack(const T* x, int64_t stride, int rows, int columns, float factor, float* out) {
  for (int column = 0; column < columns; column += kPanel) {
    for (int i = 0; i < rows; ++i, out += kPanel) {
      const T* row = x + i * stride + column;
      const int width = columns - column;
      for (int j = 0; j < kPanel; j += kLanes) {
        f32v v = {};
        if (j + kLanes <= width)
          v = load(row + j);
        else if (j < width)
          v = load_n(row + j, width - j);
        store(out + j, v * factor);
      }
    }
  }
}

BU_INLINE void transpose4(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
#if defined(__clang__)
#define BU_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else  // GCC 11 does not know that one
  typedef int32_t i32x4 __attribute__((vector_size(16)));
#define BU_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, i32x4{i, j, k, l})
#endif
  const f32x4 a = load_bits<f32x4>(in), b = load_bits<f32x4>(in + in_stride);
  const f32x4 c = load_bits<f32x4>(in + 2 * in_stride), d = load_bits<f32x4>(in + 3 * in_stride);
  const f32x4 ab0 = BU_SHUFFLE(a, b, 0, 4, 1, 5), ab1 = BU_SHUFFLE(a, b, 2, 6, 3, 7);
  const f32x4 cd0 = BU_SHUFFLE(c, d, 0, 4, 1, 5), cd1 = BU_SHUFFLE(c, d, 2, 6, 3, 7);
  store_bits(out, BU_SHUFFLE(ab0, cd0, 0, 1, 4, 5));
  store_bits(out + out_stride, BU_SHUFFLE(ab0, cd0, 2, 3, 6, 7));
  store_bits(out + 2 * out_stride, BU_SHUFFLE(ab1, cd1, 0, 1, 4, 5));
  store_bits(out + 3 * out_stride, BU_SHUFFLE(ab1, cd1, 2, 3, 6, 7));
#undef BU_SHUFFLE
}

// Packs the transpose of `rows` x `columns` (columns a multiple of 4, contiguous rows of `stride`
// floats) as the B of a product whose depth runs over its columns. Missing rows up to a multiple of
// kLanes are zero; gemm reads no further.
inline void pack_transposed(const float* x, int64_t stride, int rows, int columns, float* out) {
  for (int row = 0; row < rows; row += kPanel, out += static_cast<int64_t>(columns) * kPanel) {
    const int height = rows - row < kPanel ? rows - row : kPanel;
    int i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= height && columns % 16 == 0; i += 16) {
      for (int k = 0; k < columns; k += 16) {
        Words words[16];
        for (int j = 0; j < 16; ++j) words[j] = load_bits<__m512i>(x + (row + i + j) * stride + k);
        transpose16(words);
        for (int j = 0; j < 16; ++j) store_bits(out + (k + j) * kPanel + i, words[j]);
      }
    }
#endif
    for (; i + 4 <= height; i += 4)
      for (int k = 0; k < columns; k += 4)
        transpose4(x + (row + i) * stride + k, stride, out + k * kPanel + i, kPanel);
    for (; i < round_up(height, kLanes); ++i)
      for (int k = 0; k < columns; ++k)
        out[k * kPanel + i] = i < height ? x[(row + i) * stride + k] : 0.0f;
  }
}

}  // namespace bert_unpad::BERT_UNPAD_ISA
