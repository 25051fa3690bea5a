// 16 words of 32 bits, each a pair of bf16 numbers or one of fp32: what kernels that multiply bf16
// do with them besides multiplying. One AVX-512 register, or four of NEON.
//
// A mask has a bit for each column, the first one lowest. Where loads take one, it is that of the
// first columns, and the other numbers read as zero.
#pragma once

#include "cpu/simd.h"
#if !defined(__AVX512F__)
#include "cpu/gemm_simd.h"
#endif

namespace bert_unpad::BERT_UNPAD_ISA {

inline constexpr int kVectors = 16 / kLanes;  // of 16 fp32 columns

BU_INLINE uint32_t first_columns(int n) {
  return n >= 32 ? 0xffffffffu : n <= 0 ? 0u : (1u << n) - 1u;
}

#if defined(__AVX512F__)

typedef __m512i Words;

// v where the mask has a bit, else 0.
BU_INLINE f32v masked(f32v v, uint32_t mask) {
  return (f32v)_mm512_maskz_mov_ps(static_cast<__mmask16>(mask), (__m512)v);
}

// 32 numbers of a row.
BU_INLINE Words load_first(const bf16* x, uint32_t mask) {
  return _mm512_maskz_loadu_epi16(mask, x);
}

// 32 numbers as bf16: the 16 of `low`, then the 16 of `high`.
BU_INLINE Words narrow_two(const f32v* low, const f32v* high) {
#if defined(__AVX512BF16__)
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)*high, (__m512)*low);
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)narrow_bf16(*low)),
                            (__m256i)narrow_bf16(*high), 1);
#endif
}

// Its numbers 0, 16, 1, 17, ...: column by column of two rows of 16.
BU_INLINE Words interleave(Words two_rows) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, two_rows);
}

// Two rows of 16 numbers, column by column.
BU_INLINE Words interleave(__m256i a, __m256i b) {
  return interleave(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
}
BU_INLINE Words load_pairs(const bf16* a, uint32_t a_mask, const bf16* b, uint32_t b_mask) {
  return interleave(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(a_mask), a),
                    _mm256_maskz_loadu_epi16(static_cast<__mmask16>(b_mask), b));
}

// Transposes 16 rows of 16 words.
BU_INLINE void transpose16(Words (&r)[16]) {
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

#else

struct Words {
  u32v v[4];
};

BU_INLINE f32v masked(f32v v, uint32_t mask) {
  return as_f32(as_u32(v) & (u32v)vtstq_u32(vdupq_n_u32(mask), uint32x4_t{1, 2, 4, 8}));
}

// kCount numbers, a copy of constant size where the mask has them all.
template <int kCount>
BU_INLINE void copy_first(const bf16* x, uint32_t mask, void* out) {
  constexpr uint32_t kAll = 0xffffffffu >> (32 - kCount);
  if ((mask & kAll) == kAll)
    std::memcpy(out, x, 2 * kCount);
  else
    std::memcpy(out, x, 2 * __builtin_popcount(mask & kAll));
}

BU_INLINE Words load_first(const bf16* x, uint32_t mask) {
  Words words = {};
  copy_first<32>(x, mask, &words);
  return words;
}

BU_INLINE Words narrow_two(const f32v* low, const f32v* high) {
  const auto pair = [](const f32v* v) __attribute__((always_inline)) {
    const bfloat16x8_t first = vcvtq_low_bf16_f32((float32x4_t)v[0]);
    return (u32v)vcvtq_high_bf16_f32(first, (float32x4_t)v[1]);
  };
  return {{pair(low), pair(low + 2), pair(high), pair(high + 2)}};
}

BU_INLINE Words interleave(Words two_rows) {
  Words out;
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const auto a = (uint16x8_t)two_rows.v[i], b = (uint16x8_t)two_rows.v[i + 2];
    out.v[2 * i] = (u32v)vzip1q_u16(a, b);
    out.v[2 * i + 1] = (u32v)vzip2q_u16(a, b);
  }
  return out;
}

BU_INLINE Words load_pairs(const bf16* a, uint32_t a_mask, const bf16* b, uint32_t b_mask) {
  Words rows = {};
  copy_first<16>(a, a_mask, rows.v);
  copy_first<16>(b, b_mask, rows.v + 2);
  return interleave(rows);
}

BU_INLINE void transpose16(Words (&r)[16]) {
  Words t[16];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j)
      transpose4(reinterpret_cast<const float*>(&r[4 * i].v[j]), 16,
                 reinterpret_cast<float*>(&t[4 * j].v[i]), 16);
  std::memcpy(r, t, sizeof(r));
}

#endif

}  // namespace bert_unpad::BERT_UNPAD_ISA
