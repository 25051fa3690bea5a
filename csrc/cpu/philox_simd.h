// Philox for a vector of counters, with the coordinates of common/philox.h. Gives the words of both
// kinds of dropout mask in the order in which row-wise kernels read them: 16 bits per column.
#pragma once

#include "common/philox.h"
#include "cpu/simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {

struct Philox4v {
  u32v w[4];
};

// High and low 32 bits of a 32 x 32 bit product per lane.
BU_INLINE void mul_hi_lo(u32v a, uint32_t m, u32v& hi, u32v& lo) {
#if defined(__AVX512F__)
  const __m512i x = (__m512i)a, k = _mm512_set1_epi32(static_cast<int>(m));
  const __m512i even = _mm512_mul_epu32(x, k);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), k);
  lo = (u32v)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  hi = (u32v)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
  const __m256i x = (__m256i)a, k = _mm256_set1_epi32(static_cast<int>(m));
  const __m256i even = _mm256_mul_epu32(x, k);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), k);
  lo = (u32v)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  hi = (u32v)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t product = static_cast<uint64_t>(a[i]) * m;
    hi[i] = static_cast<uint32_t>(product >> 32);
    lo[i] = static_cast<uint32_t>(product);
  }
#endif
}

BU_INLINE Philox4v philox4x32_10_v(u32v c0, uint32_t row_word, uint32_t stream, RngKey key) {
  u32v c1 = u32v{} + row_word, c2 = u32v{} + stream, c3 = u32v{} + key.offset;
  uint32_t k0 = key.k0, k1 = key.k1;
  for (int round = 0; round < 10; ++round) {
    u32v hi0, lo0, hi1, lo1;
    mul_hi_lo(c0, kPhiloxM0, hi0, lo0);
    mul_hi_lo(c2, kPhiloxM1, hi1, lo1);
    c0 = hi1 ^ c1 ^ k0;
    c1 = lo1;
    c2 = hi0 ^ c3 ^ k1;
    c3 = lo0;
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

BU_INLINE u32v lane_index() {
  u32v v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// --- row dropout
// -------------------------------------------------------------------------------------

// Columns that one row_dropout_words call covers.
inline constexpr int kRowDropoutColumns = 8 * kLanes;

// The 16-bit words of `kRowDropoutColumns` columns from `column` (a multiple of 8) on.
BU_INLINE void row_dropout_words(RngKey key, uint32_t row, uint32_t column, uint16_t* words) {
  // Lane 4 * L + k draws call (kLanes / 4) * k + L, so that the 4 x 4 transposition inside each
  // 128-bit lane leaves the calls in order.
  const u32v lane = lane_index();
  const u32v call = (lane & 3u) * (kLanes / 4) + (lane >> 2);
  const Philox4v r = philox4x32_10_v(call + column / 8, row, 0u, key);
#if defined(__AVX512F__)
  const __m512i a = (__m512i)r.w[0], b = (__m512i)r.w[1], c = (__m512i)r.w[2], d = (__m512i)r.w[3];
  const __m512i ab0 = _mm512_unpacklo_epi32(a, b), ab1 = _mm512_unpackhi_epi32(a, b);
  const __m512i cd0 = _mm512_unpacklo_epi32(c, d), cd1 = _mm512_unpackhi_epi32(c, d);
  store_bits(words, _mm512_unpacklo_epi64(ab0, cd0));
  store_bits(words + 32, _mm512_unpackhi_epi64(ab0, cd0));
  store_bits(words + 64, _mm512_unpacklo_epi64(ab1, cd1));
  store_bits(words + 96, _mm512_unpackhi_epi64(ab1, cd1));
#elif defined(__AVX2__)
  const __m256i a = (__m256i)r.w[0], b = (__m256i)r.w[1], c = (__m256i)r.w[2], d = (__m256i)r.w[3];
  const __m256i ab0 = _mm256_unpacklo_epi32(a, b), ab1 = _mm256_unpackhi_epi32(a, b);
  const __m256i cd0 = _mm256_unpacklo_epi32(c, d), cd1 = _mm256_unpackhi_epi32(c, d);
  store_bits(words, _mm256_unpacklo_epi64(ab0, cd0));
  store_bits(words + 16, _mm256_unpackhi_epi64(ab0, cd0));
  store_bits(words + 32, _mm256_unpacklo_epi64(ab1, cd1));
  store_bits(words + 48, _mm256_unpackhi_epi64(ab1, cd1));
#else
  for (int k = 0; k < 4; ++k)
    for (int w = 0; w < 4; ++w) {
      const uint32_t word = r.w[w][k];
      std::memcpy(words + 8 * k + 2 * w, &word, 4);
    }
#endif
}

// --- attention dropout
// -------------------------------------------------------------------------------

// Columns that one attention_dropout_words call covers.
inline constexpr int kAttentionDropoutColumns = 4 * kLanes;

// The words of rows `row` and `row + 8` (row % 16 < 8) for kAttentionDropoutColumns columns from
// `column` (a multiple of 16) on.
BU_INLINE void attention_dropout_words(RngKey key, uint32_t sequence_head, uint32_t row,
                                       uint32_t column, uint16_t* words, uint16_t* words8) {
  const AttentionDropoutCoord at = attention_dropout_coord(row, column);
  const Philox4v r =
      philox4x32_10_v(lane_index() + at.column_word, at.row_word, 1u + sequence_head, key);
  uint32_t w[4][kLanes];
  for (int i = 0; i < 4; ++i) store_bits(w[i], r.w[i]);
  // Each 4-lane chunk of w[0] is 8 columns of `row`, of w[1] the next 8; w[2], w[3]: row + 8.
  for (int chunk = 0; chunk < kLanes / 4; ++chunk) {
    std::memcpy(words + 16 * chunk, w[0] + 4 * chunk, 16);
    std::memcpy(words + 16 * chunk + 8, w[1] + 4 * chunk, 16);
    std::memcpy(words8 + 16 * chunk, w[2] + 4 * chunk, 16);
    std::memcpy(words8 + 16 * chunk + 8, w[3] + 4 * chunk, 16);
  }
}

#if (defined(__AVX512BW__) && defined(__BMI2__)) || defined(__aarch64__)
// The same for 64 columns as bits, 16 columns a number: set where the word is below the threshold.
// Writes 4 numbers of each row.
BU_INLINE void attention_dropout_kept(RngKey key, uint32_t sequence_head, uint32_t row,
                                      uint32_t column, uint32_t threshold, uint16_t* bits,
                                      uint16_t* bits8) {
#if defined(__aarch64__)
  const auto kept = [threshold](const uint16_t* words) __attribute__((always_inline)) {
    constexpr uint16x8_t kBits = {1, 2, 4, 8, 16, 32, 64, 128};
    const uint16x8_t limit = vdupq_n_u16(static_cast<uint16_t>(threshold));
    const uint16_t low = vaddvq_u16(vandq_u16(vcltq_u16(vld1q_u16(words), limit), kBits));
    const uint16_t high = vaddvq_u16(vandq_u16(vcltq_u16(vld1q_u16(words + 8), limit), kBits));
    return static_cast<uint16_t>(low | high << 8);
  };
  for (int i = 0; i < 4; ++i) {
    uint16_t words[kAttentionDropoutColumns], words8[kAttentionDropoutColumns];
    attention_dropout_words(key, sequence_head, row, column + i * kAttentionDropoutColumns, words,
                            words8);
    bits[i] = kept(words);
    bits8[i] = kept(words8);
  }
#else
  const AttentionDropoutCoord at = attention_dropout_coord(row, column);
  const Philox4v r =
      philox4x32_10_v(lane_index() + at.column_word, at.row_word, 1u + sequence_head, key);
  const __m512i limit = _mm512_set1_epi16(static_cast<short>(threshold));
  uint64_t kept[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) kept[i] = _mm512_cmplt_epu16_mask((__m512i)r.w[i], limit);
  // A byte of kept[0] has 8 columns of `row`, the same byte of kept[1] the next 8.
  constexpr uint64_t kEven = 0x00ff00ff00ff00ff;
  store_bits(bits, _pdep_u64(kept[0], kEven) | _pdep_u64(kept[1], ~kEven));
  store_bits(bits8, _pdep_u64(kept[2], kEven) | _pdep_u64(kept[3], ~kEven));
#endif
}
#endif

// v where the lane's word is below the threshold (< 65,536), else 0.
BU_INLINE f32v keep(f32v v, const uint16_t* words, uint32_t threshold) {
#if defined(__AVX512F__)
  const __mmask16 kept = _mm256_cmplt_epu16_mask(load_bits<__m256i>(words),
                                                 _mm256_set1_epi16(static_cast<short>(threshold)));
  return (f32v)_mm512_maskz_mov_ps(kept, (__m512)v);
#else
  const i32v word = (i32v)widen_u16(load_bits<u16v>(words));
  return as_f32(as_u32(v) & (u32v)(word < static_cast<int32_t>(threshold)));
#endif
}

}  // namespace bert_unpad::BERT_UNPAD_ISA
