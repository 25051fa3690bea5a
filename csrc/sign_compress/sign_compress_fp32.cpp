// Packing signs, and sums of packed signs. All are limited by memory.
#include "cpu/strip_simd.h"
#include "sign_compress/sign_compress.h"

#if !defined(__AVX2__) && defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

constexpr uint32_t kSignBit = 0x80000000u;
constexpr int kStep = kStripVectors * kLanes;  // 64, 16 or 8 elements: whole bytes
static_assert(kStep % 8 == 0);

// Bit i: the sign bit of lane i.
BU_INLINE uint32_t sign_bits(f32v v) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)v);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)v));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps((__m128)v));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= as_u32(v)[i] >> 31 << i;
  return bits;
#endif
}

// v with the sign of lane i turned where bit i is set.
BU_INLINE f32v turn_signs(f32v v, uint32_t bits) {
#if defined(__AVX512F__)
  return (f32v)_mm512_mask_xor_epi32((__m512i)v, static_cast<__mmask16>(bits), (__m512i)v,
                                     _mm512_set1_epi32(static_cast<int>(kSignBit)));
#else
  u32v shift;
  for (int i = 0; i < kLanes; ++i) shift[i] = 31 - i;
  return as_f32(as_u32(v) ^ ((bits << shift) & kSignBit));
#endif
}

BU_INLINE f32v with_sign_of(f32v magnitude, f32v v) {
  return as_f32(as_u32(magnitude) | (as_u32(v) & kSignBit));
}

// Past the caches, to an address that is a multiple of a vector: memory is then not read first,
// which an ordinary store to a line that is not cached does.
BU_INLINE void stream(float* p, f32v v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#elif defined(__SSE2__)
  _mm_stream_ps(p, (__m128)v);
#else
  store(p, v);
#endif
}

BU_INLINE void end_streaming() {
#if defined(__AVX2__) || defined(__SSE2__)
  _mm_sfence();
#endif
}

template <class T, class Width>
BU_INLINE auto load_sum(const T* value, const float* error, int64_t j, Width width) {
  const auto strip = load_strip(error + j, width);
  if constexpr (sizeof(T) > 1)
    return load_strip(value + j, width) + strip;
  else
    return strip;
}

// T is char where there is no value.
template <class T>
float sum_squares_of(const SignCpuParams& p, int64_t begin, int64_t end) {
  const T* value = static_cast<const T*>(p.value);
  Strip<kStripVectors> wide{};
  int64_t j = begin;
  for (; j + kStep <= end; j += kStep) {
    const auto u = load_sum(value, p.error, j, Whole<kStripVectors>{});
    wide = wide + u * u;
  }
  f32v sum{};
  for (; j < end; j += kLanes) {
    const Tail tail{static_cast<int>(end - j < kLanes ? end - j : kLanes)};
    const f32v u = load_sum(value, p.error, j, tail).v[0];
    sum += u * u;
  }
  for (int i = 0; i < kStripVectors; ++i) sum += wide.v[i];
  return reduce_add(sum);
}

template <class T>
void pack_of(const SignCpuParams& p, int64_t begin, int64_t end, float scale) {
  const T* value = static_cast<const T*>(p.value);
  const auto lost = [scale](f32v u) { return u - with_sign_of(splat(scale), u); };
  int64_t j = begin;
  for (; j + kStep <= end; j += kStep) {
    const auto u = load_sum(value, p.error, j, Whole<kStripVectors>{});
    uint64_t bits = 0;
    for (int i = 0; i < kStripVectors; ++i)
      bits |= static_cast<uint64_t>(sign_bits(u.v[i])) << (i * kLanes);
    for (int i = 0; i < kStep / 8; ++i) p.bits[j / 8 + i] = static_cast<uint8_t>(bits >> (8 * i));
    store_strip(p.error + j, lockstep(lost, u), Whole<kStripVectors>{});
  }
  for (int64_t k = j; k < end; k += 8) p.bits[k / 8] = 0;
  for (; j < end; j += kLanes) {  // kLanes is 16, 8 or 4: two tails may share a byte
    const Tail tail{static_cast<int>(end - j < kLanes ? end - j : kLanes)};
    const auto u = load_sum(value, p.error, j, tail);
    const uint32_t bits = sign_bits(first(u.v[0], tail)) << (j % 8);
    p.bits[j / 8] |= static_cast<uint8_t>(bits);
    if (tail.n > 8) p.bits[j / 8 + 1] |= static_cast<uint8_t>(bits >> 8);
    store_strip(p.error + j, lockstep(lost, u), tail);
  }
}

enum class Write { kStore, kStream, kAdd };

template <Write kWrite>
void mean_of(const SignMeanCpuParams& p, int64_t begin, int64_t end) {
  int64_t j = begin;
  for (; j + kStep <= end; j += kStep) {
    Strip<kStripVectors> sum{};
    const uint8_t* bytes = p.bits + j / 8;
    for (int64_t r = 0; r < p.ranks; ++r, bytes += p.stride) {
      uint64_t bits = 0;
      for (int i = 0; i < kStep / 8; ++i) bits |= static_cast<uint64_t>(bytes[i]) << (8 * i);
      const f32v weight = splat(p.weights[r]);
      for (int i = 0; i < kStripVectors; ++i)
        sum.v[i] += turn_signs(weight, static_cast<uint32_t>(bits >> (i * kLanes)));
    }
    if constexpr (kWrite == Write::kStream) {
      for (int i = 0; i < kStripVectors; ++i) stream(p.out + j + i * kLanes, sum.v[i]);
    } else {
      if constexpr (kWrite == Write::kAdd)
        sum = load_strip(p.out + j, Whole<kStripVectors>{}) + sum;
      store_strip(p.out + j, sum, Whole<kStripVectors>{});
    }
  }
  for (; j < end; ++j) {
    float sum = 0.0f;
    for (int64_t r = 0; r < p.ranks; ++r) {
      const bool negative = p.bits[r * p.stride + j / 8] >> (j % 8) & 1;
      sum += negative ? -p.weights[r] : p.weights[r];
    }
    p.out[j] = kWrite == Write::kAdd ? p.out[j] + sum : sum;
  }
  if constexpr (kWrite == Write::kStream) end_streaming();
}

float sum_squares(const SignCpuParams& p, int64_t begin, int64_t end) {
  if (p.value == nullptr) return sum_squares_of<char>(p, begin, end);
  switch (p.dtype) {
    case DType::kFloat32:
      return sum_squares_of<float>(p, begin, end);
    case DType::kBFloat16:
      return sum_squares_of<bf16>(p, begin, end);
    case DType::kFloat16:
      return sum_squares_of<f16>(p, begin, end);
  }
  return 0.0f;
}

void pack(const SignCpuParams& p, int64_t begin, int64_t end, float scale) {
  if (p.value == nullptr) return pack_of<char>(p, begin, end, scale);
  switch (p.dtype) {
    case DType::kFloat32:
      return pack_of<float>(p, begin, end, scale);
    case DType::kBFloat16:
      return pack_of<bf16>(p, begin, end, scale);
    case DType::kFloat16:
      return pack_of<f16>(p, begin, end, scale);
  }
}

void mean(const SignMeanCpuParams& p, int64_t begin, int64_t end) {
  const bool aligned = reinterpret_cast<uintptr_t>(p.out + begin) % sizeof(f32v) == 0;
  if (p.add)
    mean_of<Write::kAdd>(p, begin, end);
  else if (p.past_caches && aligned)
    mean_of<Write::kStream>(p, begin, end);
  else
    mean_of<Write::kStore>(p, begin, end);
}

}  // namespace

extern const SignKernels sign_kernels = {sum_squares, pack, mean};

}  // namespace bert_unpad::BERT_UNPAD_ISA
