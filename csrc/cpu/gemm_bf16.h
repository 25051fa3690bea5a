// A product of bf16 matrices with fp32 sums, C (+)= A B, for the instruction sets that multiply
// bf16: by AMX tiles where BU_AMX is defined, else by AVX512-BF16 dot products of pairs. It does no
// blocking for caches.
//
// A is stored row by row or in tiles (see Bf16Rows). B is stored in panels of 16 columns; in a
// panel, each pair of rows 2k, 2k + 1 is stored as 16 columns of two numbers, as both kinds of
// instruction read it: [columns / 16][depth / 2][16][2]. Rows and columns are multiples of 16, the
// depth of 32.
#pragma once

#include "cpu/simd.h"
#if defined(BU_AMX)
#include "cpu/tiles.h"
#endif

namespace bert_unpad::BERT_UNPAD_ISA {

inline constexpr int kPairColumns = 16;  // of a panel

// 32 numbers as bf16: those of `low`, then those of `high`.
BU_INLINE __m512i narrow_two(f32v low, f32v high) {
#if defined(__AVX512BF16__)
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)narrow_bf16(low)),
                            (__m256i)narrow_bf16(high), 1);
#endif
}

// Its numbers 0, 16, 1, 17, ...: column by column of two rows of 16.
BU_INLINE __m512i interleave(__m512i two_rows) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, two_rows);
}

// Two rows of 16 numbers, column by column.
BU_INLINE __m512i interleave(__m256i a, __m256i b) {
  return interleave(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
}

// Transposes 16 rows of 16 words of 32 bits.
BU_INLINE void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // r[i + c]: column 4l + c of rows i .. i + 3, in lane l
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xdd);
    const __m512i low23 = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x88);
    const __m512i high23 = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xdd);
    t[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    t[c + 8] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    t[c + 4] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    t[c + 12] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// --- packing
// ---------------------------------------------------------------------------------------

BU_INLINE __mmask32 first_columns(int n) {
  return n >= 32 ? 0xffffffffu : n <= 0 ? 0u : (1u << n) - 1u;
}

// Copies rows, with zeros from `columns` to `width` (a multiple of 32) and from `rows` to `height`.
inline void copy_rows(const bf16* x, int64_t stride, int rows, int columns, int height, int width,
                      bf16* out) {
  for (int i = 0; i < height; ++i, x += stride, out += width)
    for (int c = 0; c < width; c += 32)
      store_bits(out + c, i < rows ? _mm512_maskz_loadu_epi16(first_columns(columns - c), x + c)
                                   : _mm512_setzero_si512());
}

// Packs x [rows, columns] as a B whose depth runs over the rows; what is missing up to `depth`
// (a multiple of 32) rows and whole panels is zero.
inline void pack_pairs(const bf16* x, int64_t stride, int rows, int columns, int depth, bf16* out) {
  for (int c = 0; c < columns; c += kPairColumns) {
    const auto mask = static_cast<__mmask16>(first_columns(columns - c));
    for (int i = 0; i < depth; i += 2, out += 2 * kPairColumns) {
      const bf16* row = x + i * stride + c;
      const __m256i zero = _mm256_setzero_si256();
      const __m256i a = i < rows ? _mm256_maskz_loadu_epi16(mask, row) : zero;
      const __m256i b = i + 1 < rows ? _mm256_maskz_loadu_epi16(mask, row + stride) : zero;
      store_bits(out, interleave(a, b));
    }
  }
}

// Packs the transpose of x [rows, columns] as a B whose depth runs over the columns; what is
// missing up to `width` (a multiple of 16) rows and `depth` (of 32) columns is zero.
inline void pack_pairs_transposed(const bf16* x, int64_t stride, int rows, int columns, int width,
                                  int depth, bf16* out) {
  for (int row = 0; row < width; row += kPairColumns)
    for (int c = 0; c < depth; c += 32, out += 32 * kPairColumns) {
      const __mmask32 mask = first_columns(columns - c);
      __m512i r[16];
      for (int i = 0; i < 16; ++i)
        r[i] = row + i < rows ? _mm512_maskz_loadu_epi16(mask, x + (row + i) * stride + c)
                              : _mm512_setzero_si512();
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

// 8 rows of kPanels panels.
template <int kPanels>
BU_INLINE void gemm_block(Bf16Rows a, Bf16Panels b, int depth, float* c, int64_t ldc,
                          bool accumulate) {
  f32v sums[8][kPanels];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < kPanels; ++j)
      sums[i][j] = accumulate ? load(c + i * ldc + kPairColumns * j) : f32v{};
  for (int step = 0; step < depth; step += 32, a.p += a.step)
    for (int k = 0; k < 32; k += 2, b.p += 2 * kPairColumns) {
      __m512bh columns[kPanels];
#pragma GCC unroll 3
      for (int j = 0; j < kPanels; ++j)
        columns[j] = (__m512bh)load_bits<__m512i>(b.p + j * b.stride);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const auto pair = (__m512bh)_mm512_set1_epi32(load_bits<int32_t>(a.p + i * a.row + k));
#pragma GCC unroll 3
        for (int j = 0; j < kPanels; ++j)
          sums[i][j] = (f32v)_mm512_dpbf16_ps((__m512)sums[i][j], pair, columns[j]);
      }
    }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < kPanels; ++j) store(c + i * ldc + kPairColumns * j, sums[i][j]);
}

template <int kPanels>
inline void gemm_columns(Bf16Rows a, int rows, Bf16Panels b, int depth, float* c, int64_t ldc,
                         bool accumulate) {
  for (; rows > 0; rows -= 16, a.p += a.block, c += 16 * ldc) {
    Bf16Rows second = a;
    second.p += 8 * a.row;
    gemm_block<kPanels>(a, b, depth, c, ldc, accumulate);
    gemm_block<kPanels>(second, b, depth, c + 8 * ldc, ldc, accumulate);
  }
}

inline void gemm_bf16(Bf16Rows a, int rows, Bf16Panels b, int columns, int depth, float* c,
                      int64_t ldc, bool accumulate) {
  constexpr int kStep = 3 * kPairColumns;
  for (; columns >= kStep; columns -= kStep, b.p += 3 * b.stride, c += kStep)
    gemm_columns<3>(a, rows, b, depth, c, ldc, accumulate);
  if (columns == 2 * kPairColumns)
    gemm_columns<2>(a, rows, b, depth, c, ldc, accumulate);
  else if (columns > 0)
    gemm_columns<1>(a, rows, b, depth, c, ldc, accumulate);
}

// Where AMX needs its registers set up, nothing.
struct TileRegisters {
  TileRegisters() {}
  ~TileRegisters() {}
};

#endif

}  // namespace bert_unpad::BERT_UNPAD_ISA
