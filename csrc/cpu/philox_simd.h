// Philox for a vector of counters, with the coordinates of common/philox.h. Gives the words of both
// kinds of dropout mask in the order in which row-wise kernels read them: 16 bits per column, which
// are below the threshold where the element is kept.
#pragma once

#include "common/philox.h"
#include "cpu/simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {

struct Philox4v {
  u32v w[4];
};

// The bits of the last 8 decisions.
BU_INLINE Philox4v rotated(const Philox4v& bits) {
  Philox4v r;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) r.w[i] = bits.w[i] >> 8 | bits.w[(i + 1) % 4] << 24;
  return r;
}

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

BU_INLINE Philox4v philox4x32_v(u32v c0, u32v c1, uint32_t stream, RngKey key) {
  u32v c2 = u32v{} + stream, c3 = u32v{} + key.offset;
  uint32_t k0 = key.k0, k1 = key.k1;
  for (int round = 0; round < kPhiloxRounds; ++round) {
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

// Half-words by their rank (half_rank), from the other end where what is below KeepRule's limit is
// dropped: then `threshold` numbers are kept, and they are below the threshold.
BU_INLINE u32v keep_order(u32v half_words, uint32_t flip) {
  typedef int16_t Signed __attribute__((vector_size(4 * kLanes)));
  typedef uint16_t Unsigned __attribute__((vector_size(4 * kLanes)));
  const auto x = (Signed)half_words;
  const auto rank = (Unsigned)(x ^ ((x >> 15) & 0x7fff)) + static_cast<uint16_t>(0x7c01);
  return (u32v)(rank ^ static_cast<uint16_t>(flip));
}

// --- row dropout
// -------------------------------------------------------------------------------------

// Columns that one row_dropout_words call covers.
inline constexpr int kRowDropoutColumns = kRowDropoutGroup * kLanes;

// The words of `kRowDropoutColumns` columns from `column` (a multiple of 16) on: 16 bits each,
// below the threshold for what is kept.
BU_INLINE void row_dropout_words(RngKey key, uint32_t flip, uint32_t row, uint32_t column,
                                 uint16_t* words) {
  // Lane 4 * L + k draws call (kLanes / 4) * k + L, so that the 4 x 4 transposition inside each
  // 128-bit lane leaves the calls in order.
  const u32v lane = lane_index();
  const u32v call = (lane & 3u) * (kLanes / 4) + (lane >> 2);
  const Philox4v r = philox4x32_v(call + column / kRowDropoutGroup, u32v{} + row, 0u, key);
#if defined(__AVX512F__)
  const __m512i a = (__m512i)r.w[0], b = (__m512i)r.w[1], c = (__m512i)r.w[2], d = (__m512i)r.w[3];
  const __m512i ab0 = _mm512_unpacklo_epi32(a, b), ab1 = _mm512_unpackhi_epi32(a, b);
  const __m512i cd0 = _mm512_unpacklo_epi32(c, d), cd1 = _mm512_unpackhi_epi32(c, d);
  const __m512i calls[4] = {_mm512_unpacklo_epi64(ab0, cd0), _mm512_unpackhi_epi64(ab0, cd0),
                            _mm512_unpacklo_epi64(ab1, cd1), _mm512_unpackhi_epi64(ab1, cd1)};
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  const __m512i last = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const auto direct = (__m512i)keep_order((u32v)calls[k], flip);
    const auto turned = (__m512i)keep_order((u32v)_mm512_alignr_epi8(calls[k], calls[k], 1), flip);
    store_bits(words + 64 * k, _mm512_permutex2var_epi64(direct, first, turned));
    store_bits(words + 64 * k + 32, _mm512_permutex2var_epi64(direct, last, turned));
  }
#elif defined(__AVX2__)
  const __m256i a = (__m256i)r.w[0], b = (__m256i)r.w[1], c = (__m256i)r.w[2], d = (__m256i)r.w[3];
  const __m256i ab0 = _mm256_unpacklo_epi32(a, b), ab1 = _mm256_unpackhi_epi32(a, b);
  const __m256i cd0 = _mm256_unpacklo_epi32(c, d), cd1 = _mm256_unpackhi_epi32(c, d);
  const __m256i calls[4] = {_mm256_unpacklo_epi64(ab0, cd0), _mm256_unpackhi_epi64(ab0, cd0),
                            _mm256_unpacklo_epi64(ab1, cd1), _mm256_unpackhi_epi64(ab1, cd1)};
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const auto direct = (__m256i)keep_order((u32v)calls[k], flip);
    const auto turned = (__m256i)keep_order((u32v)_mm256_alignr_epi8(calls[k], calls[k], 1), flip);
    store_bits(words + 32 * k, _mm256_permute2x128_si256(direct, turned, 0x20));
    store_bits(words + 32 * k + 16, _mm256_permute2x128_si256(direct, turned, 0x31));
  }
#else
  const Philox4v turned = rotated(r);
  for (int k = 0; k < 4; ++k) {
    store_bits(words + 16 * k, keep_order(u32v{r.w[0][k], r.w[1][k], r.w[2][k], r.w[3][k]}, flip));
    store_bits(
        words + 16 * k + 8,
        keep_order(u32v{turned.w[0][k], turned.w[1][k], turned.w[2][k], turned.w[3][k]}, flip));
  }
#endif
}

// --- attention dropout
// -------------------------------------------------------------------------------

// What one draw_attention call covers: so many rows from r and from r + 8 on, and their columns.
inline constexpr int kAttentionDropoutRows = kLanes == 16 ? 2 : 1;
inline constexpr int kAttentionDropoutColumns = kLanes == 4 ? 32 : 64;

// Parts of 16 bytes from one vector, the next, ...: first part 0 of all four, then part 1, ...
BU_INLINE void transpose_parts(u32v (&v)[4]) {
#if defined(__AVX512F__)
  const __m512i a = (__m512i)v[0], b = (__m512i)v[1], c = (__m512i)v[2], d = (__m512i)v[3];
  const __m512i ab0 = _mm512_shuffle_i32x4(a, b, 0x44), ab2 = _mm512_shuffle_i32x4(a, b, 0xee);
  const __m512i cd0 = _mm512_shuffle_i32x4(c, d, 0x44), cd2 = _mm512_shuffle_i32x4(c, d, 0xee);
  v[0] = (u32v)_mm512_shuffle_i32x4(ab0, cd0, 0x88);
  v[1] = (u32v)_mm512_shuffle_i32x4(ab0, cd0, 0xdd);
  v[2] = (u32v)_mm512_shuffle_i32x4(ab2, cd2, 0x88);
  v[3] = (u32v)_mm512_shuffle_i32x4(ab2, cd2, 0xdd);
#elif defined(__AVX2__)
  const __m256i a = (__m256i)v[0], b = (__m256i)v[1], c = (__m256i)v[2], d = (__m256i)v[3];
  v[0] = (u32v)_mm256_permute2x128_si256(a, b, 0x20);
  v[1] = (u32v)_mm256_permute2x128_si256(c, d, 0x20);
  v[2] = (u32v)_mm256_permute2x128_si256(a, b, 0x31);
  v[3] = (u32v)_mm256_permute2x128_si256(c, d, 0x31);
#else
  static_cast<void>(v);
#endif
}

// The words of 32 columns of a row.
struct Words32 {
  u32v v[16 / kLanes];
};

// put(i, j, words) for all that one call covers: words of row `row` + i and the 32 columns from
// `column` + j on. Of `row` the rest modulo 16 is a multiple of kAttentionDropoutRows below 8, and
// `column` is a multiple of 32.
template <class Put>
BU_INLINE void draw_attention(RngKey key, uint32_t flip, uint32_t sequence_head, uint32_t row,
                              uint32_t column, const Put& put) {
  constexpr int kParts = kAttentionDropoutColumns / 32;      // of a row
  constexpr uint32_t kCalls = kAttentionDropoutColumns / 8;  // for a row
  const AttentionDropoutCoord at = attention_dropout_coord(row, column);
  const u32v lane = lane_index();
  const Philox4v r = philox4x32_v(lane / kCalls + at.row_word,
                                  (lane & (kCalls - 1)) + at.column_word, 1u + sequence_head, key);
  const Philox4v turned = rotated(r);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    u32v v[4] = {r.w[2 * half], r.w[2 * half + 1], turned.w[2 * half], turned.w[2 * half + 1]};
    transpose_parts(v);
#pragma GCC unroll 4
    for (int part = 0; part < kLanes / 4; ++part) {
      Words32 words;
#pragma GCC unroll 4
      for (int i = 0; i < 16 / kLanes; ++i)
        words.v[i] = keep_order(v[part * (16 / kLanes) + i], flip);
      put(part / kParts + 8 * half, part % kParts * 32, words);
    }
  }
}

#if defined(__AVX512BW__) || defined(__aarch64__)
// A bit for each column, the first one lowest, set where the weight is kept.
BU_INLINE uint32_t kept_bits(const Words32& words, uint32_t threshold) {
#if defined(__aarch64__)
  constexpr uint16x8_t kBits = {1, 2, 4, 8, 16, 32, 64, 128};
  const uint16x8_t limit = vdupq_n_u16(static_cast<uint16_t>(threshold));
  uint32_t bits = 0;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    bits |= static_cast<uint32_t>(
                vaddvq_u16(vandq_u16(vcltq_u16((uint16x8_t)words.v[i], limit), kBits)))
            << (8 * i);
  return bits;
#else
  return _mm512_cmplt_epu16_mask((__m512i)words.v[0],
                                 _mm512_set1_epi16(static_cast<short>(threshold)));
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
