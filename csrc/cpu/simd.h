// The vector type of the instruction set a *_simd.cpp file is compiled for, and what kernels need
// of it. GCC/Clang vector extensions carry the arithmetic, so that one source serves SSE2, AVX2,
// AVX-512 and NEON; intrinsics appear only where the extensions cannot express an instruction.
// Everything here lives in the namespace of the instruction set (see cpu/isa.h for why).
#pragma once

#include <cstdint>
#include <cstring>

#include "common/types.h"

#if defined(__AVX2__)
// GCC 12 takes the `__m512 __Y = __Y;` by which its own header says "any value" for a mistake.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef BERT_UNPAD_ISA
#error \
    "simd.h is for *_simd.cpp, *_fp32.cpp and *_bf16.cpp files: they are compiled per instruction set"
#endif

#define BU_INLINE __attribute__((always_inline)) inline

namespace bert_unpad::BERT_UNPAD_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
inline constexpr int kVectorRegisters = 32;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
inline constexpr int kVectorRegisters = 16;
#else
inline constexpr int kLanes = 4;
#if defined(__aarch64__)
inline constexpr int kVectorRegisters = 32;
#else
inline constexpr int kVectorRegisters = 16;
#endif
#endif

BU_INLINE int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

typedef float f32v __attribute__((vector_size(4 * kLanes), may_alias));
typedef int32_t i32v __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint32_t u32v __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint16_t u16v __attribute__((vector_size(2 * kLanes), may_alias));
typedef int16_t i16v __attribute__((vector_size(2 * kLanes), may_alias));
typedef float f32x4 __attribute__((vector_size(16), may_alias));

template <class V>
BU_INLINE V load_bits(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
template <class V>
BU_INLINE void store_bits(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

// Not f32v{} + x: that adds (-0 + 0 = 0), and GCC then broadcasts from a register, which takes the
// port of an FMA, instead of from memory.
BU_INLINE f32v splat(float x) {
#if defined(__AVX512F__)
  return (f32v)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (f32v)_mm256_set1_ps(x);
#else
  return f32v{x, x, x, x};
#endif
}
BU_INLINE f32v as_f32(u32v v) { return (f32v)v; }
BU_INLINE u32v as_u32(f32v v) { return (u32v)v; }
BU_INLINE f32v select(i32v mask, f32v a, f32v b) { return mask ? a : b; }
// A NaN in `a` survives, one in `b` does not (as maxps does it).
#if defined(__AVX512F__)
// GCC makes a comparison and a masked move of the conditional form.
BU_INLINE f32v vmax(f32v a, f32v b) { return (f32v)_mm512_max_ps((__m512)b, (__m512)a); }
BU_INLINE f32v vmin(f32v a, f32v b) { return (f32v)_mm512_min_ps((__m512)b, (__m512)a); }
#else
BU_INLINE f32v vmax(f32v a, f32v b) { return b > a ? b : a; }
BU_INLINE f32v vmin(f32v a, f32v b) { return b < a ? b : a; }
#endif

// --- 16-bit storage
// -------------------------------------------------------------------------------

// GCC takes three to twelve instructions for __builtin_convertvector between 16 and 32 bits where
// there is one.
BU_INLINE u32v widen_u16(u16v v) {
#if defined(__AVX512F__)
  return (u32v)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
  return (u32v)_mm256_cvtepu16_epi32((__m128i)v);
#elif defined(__aarch64__)
  return (u32v)vmovl_u16((uint16x4_t)v);
#else
  return __builtin_convertvector(v, u32v);
#endif
}

// The upper halves of the lanes.
BU_INLINE u16v upper_u16(u32v v) {
#if defined(__AVX512F__)
  return (u16v)_mm512_cvtepi32_epi16((__m512i)(v >> 16));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)(v >> 16), _mm256_setzero_si256());
  return (u16v)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8));
#else
  return __builtin_convertvector(v >> 16, u16v);
#endif
}

BU_INLINE f32v widen_bf16(u16v v) { return as_f32(widen_u16(v) << 16); }

BU_INLINE u16v narrow_bf16(f32v v) {
#if defined(__AVX512BF16__)
  return (u16v)_mm512_cvtneps_pbh((__m512)v);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (u16v)vcvt_bf16_f32((float32x4_t)v);
#else
  // Round to nearest even. A NaN is truncated and stays one: the top fraction bit of all that come
  // out of arithmetic is set.
  const u32v bits = as_u32(v);
  const u32v increment = ((bits >> 16) & 1u) + 0x7fffu;
#if defined(__AVX512F__)
  const __mmask16 ordered = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_ORD_Q);
  return upper_u16(
      (u32v)_mm512_mask_add_epi32((__m512i)bits, ordered, (__m512i)bits, (__m512i)increment));
#else
  return upper_u16(bits + (increment & (u32v)(v == v)));
#endif
#endif
}

#if !defined(__F16C__) && !defined(__aarch64__)
BU_INLINE float f16_to_float(uint16_t h) {
  // Shift the 15 magnitude bits into place and rescale: exact for normals and denormals.
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  float f;
  std::memcpy(&f, &magnitude, 4);
  f *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((h & 0x7c00u) == 0x7c00u) bits |= 0x7f800000u;
  bits |= static_cast<uint32_t>(h & 0x8000u) << 16;
  std::memcpy(&f, &bits, 4);
  return f;
}
BU_INLINE uint16_t float_to_f16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  uint32_t half;
  if (bits > 0x7f800000u) {
    half = 0x7e00u;
  } else if (bits >= 0x477ff000u) {  // rounds to 65536 or above
    half = 0x7c00u;
  } else if (bits < 0x38800000u) {  // below the smallest normal: let the fp32 adder round
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&half, &magnitude, 4);
    half -= 0x3f000000u;
  } else {
    half = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>(half | sign);
}
#endif

BU_INLINE f32v widen_f16(u16v v) {
#if defined(__AVX512F__)
  return (f32v)_mm512_cvtph_ps((__m256i)v);
#elif defined(__F16C__)
  return (f32v)_mm256_cvtph_ps((__m128i)v);
#elif defined(__aarch64__)
  return (f32v)vcvt_f32_f16((float16x4_t)v);
#else
  f32v out;
  for (int i = 0; i < kLanes; ++i) out[i] = f16_to_float(v[i]);
  return out;
#endif
}
BU_INLINE u16v narrow_f16(f32v v) {
#if defined(__AVX512F__)
  return (u16v)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (u16v)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return (u16v)vcvt_f16_f32((float32x4_t)v);
#else
  u16v out;
  for (int i = 0; i < kLanes; ++i) out[i] = float_to_f16(v[i]);
  return out;
#endif
}

// --- loads and stores, any alignment
// ---------------------------------------------------------------

BU_INLINE f32v load(const float* p) { return load_bits<f32v>(p); }
BU_INLINE f32v load(const bf16* p) { return widen_bf16(load_bits<u16v>(p)); }
BU_INLINE f32v load(const f16* p) { return widen_f16(load_bits<u16v>(p)); }
BU_INLINE void store(float* p, f32v v) { store_bits(p, v); }
BU_INLINE void store(bf16* p, f32v v) { store_bits(p, narrow_bf16(v)); }
BU_INLINE void store(f16* p, f32v v) { store_bits(p, narrow_f16(v)); }

// The first n (at most kLanes) elements; the other lanes read as zero and are not written.
#if defined(__AVX512F__)
BU_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
BU_INLINE u16v load_bits_n(const void* p, int n) {
  return (u16v)_mm256_maskz_loadu_epi16(first_lanes(n), p);
}
BU_INLINE f32v load_n(const float* p, int n) {
  return (f32v)_mm512_maskz_loadu_ps(first_lanes(n), p);
}
BU_INLINE f32v load_n(const bf16* p, int n) { return widen_bf16(load_bits_n(p, n)); }
BU_INLINE f32v load_n(const f16* p, int n) { return widen_f16(load_bits_n(p, n)); }
BU_INLINE void store_n(float* p, f32v v, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), (__m512)v);
}
BU_INLINE void store_n(bf16* p, f32v v, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), (__m256i)narrow_bf16(v));
}
BU_INLINE void store_n(f16* p, f32v v, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), (__m256i)narrow_f16(v));
}
#else
template <class T>
BU_INLINE f32v load_n(const T* p, int n) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T>
BU_INLINE void store_n(T* p, f32v v, int n) {
  T buffer[kLanes];
  store(buffer, v);
  std::memcpy(p, buffer, n * sizeof(T));
}
#endif

// --- reductions and functions
// ------------------------------------------------------------------------

BU_INLINE float reduce_add(f32v v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}
// The sums of four vectors.
BU_INLINE f32x4 reduce_add(f32v a, f32v b, f32v c, f32v d) {
#if defined(__AVX512F__)
  // Quarters of two vectors become halves of one, then those of two of these quarters of one.
  const auto halves = [](f32v x, f32v y) __attribute__((always_inline)) {
    return _mm512_add_ps(_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0x44),
                         _mm512_shuffle_f32x4((__m512)x, (__m512)y, 0xee));
  };
  const __m512 ab = halves(a, b), cd = halves(c, d);
  __m512 sums =
      _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));
  sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  return (f32x4)_mm512_castps512_ps128(_mm512_permutexvar_ps(first, sums));
#elif defined(__AVX2__)
  const auto halves = [](f32v x, f32v y) __attribute__((always_inline)) {
    return _mm256_add_ps(_mm256_permute2f128_ps((__m256)x, (__m256)y, 0x20),
                         _mm256_permute2f128_ps((__m256)x, (__m256)y, 0x31));
  };
  const __m256 pairs = _mm256_hadd_ps(halves(a, b), halves(c, d));
  const __m256 sums = _mm256_hadd_ps(pairs, pairs);  // a, c, a, c, b, d, b, d
  return (f32x4)_mm_unpacklo_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
#else
  return f32x4{reduce_add(a), reduce_add(b), reduce_add(c), reduce_add(d)};
#endif
}
BU_INLINE float reduce_max(f32v v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float top = v[0];
  for (int i = 1; i < kLanes; ++i) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

BU_INLINE f32v round_to_int(f32v v) {
#if defined(__AVX512F__)
  return (f32v)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (f32v)_mm256_round_ps((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return (f32v)vrndnq_f32((float32x4_t)v);
#else
  // Adding 1.5 * 2^23 leaves no fraction bits; right for |v| < 2^22.
  return (v + 12582912.0f) - 12582912.0f;
#endif
}

// 2^f for |f| <= 1/2: the degree-6 Taylor series (coefficients ln(2)^k / k!), whose remainder is
// 1.2e-7 relative at most. V is a vector or several.
template <class V>
BU_INLINE V exp2_fraction(V f) {
  V p = f * 1.5403530e-4f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  return p * f + 1.0f;
}

// p * 2^n for whole n in [-127, 127]; 0 for n = -127 and, with AVX-512 by way of the denormals, for
// everything far below, whatever p is where n is -inf.
BU_INLINE f32v scale_exp2(f32v p, f32v n) {
#if defined(__AVX512F__)
  return (f32v)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return p * (f32v)((__builtin_convertvector(n, i32v) + 127) << 23);
#endif
}

// The smallest argument that scale_exp2 can do with.
BU_INLINE f32v clamp_exp2(f32v v) {
#if defined(__AVX512F__)
  return v;
#else
  return vmax(v, splat(-127.0f));
#endif
}

// 2^v for v <= 127, about 1 ulp; 0 far below -126.
BU_INLINE f32v exp2v(f32v v) {
  v = clamp_exp2(v);
  const f32v n = round_to_int(v);
  return scale_exp2(exp2_fraction(v - n), n);
}

// The two functions below are for results that are rounded to 16 bits.

// 2^v to 3e-6 relative for v <= 127; 0 far below -126. The polynomial is the minimax fit of 4th
// degree to 2^f on [0, 1), where AVX-512 has one instruction for f and its scalef takes v as it is.
BU_INLINE f32v exp2_short(f32v v) {
#if defined(__AVX512F__)
  const f32v n = v;
  const f32v f = (f32v)_mm512_reduce_ps((__m512)v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  v = vmax(v, splat(-126.0f));
  const f32v n = round_to_int(v - 0.5f), f = v - n;
#endif
  f32v p = f * 0.013534170f + 0.052011460f;
  p = p * f + 0.24144276f;
  p = p * f + 0.69300383f;
  return scale_exp2(p * f + 1.0000026f, n);
}

// 1 / v, a few ulp, for 1 <= v <= 2^126: a Newton step on an estimate of 11 bits or more, which is
// half the time of a division.
BU_INLINE f32v reciprocal_short(f32v v) {
#if defined(__AVX512F__)
  const f32v r = (f32v)_mm512_rcp14_ps((__m512)v);
  return r * (2.0f - v * r);
#elif defined(__AVX2__)
  const f32v r = (f32v)_mm256_rcp_ps((__m256)v);
  return r * (2.0f - v * r);
#else
  return 1.0f / v;
#endif
}

BU_INLINE f32v expv(f32v v) { return exp2v(v * 1.44269504f); }

}  // namespace bert_unpad::BERT_UNPAD_ISA
