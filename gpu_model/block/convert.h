// 16-bit floating point on the host: exact, rounding to nearest even; NaN becomes 0x7fff, as in a
// GPU's cvt.
#pragma once

#include <bit>
#include <cstdint>

#include "common/types.h"

namespace bert_unpad::block_model {

inline float decode(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline float decode(f16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = (x.bits & 0x7fffu) << 13;
  // Inf and NaN keep their bits; otherwise 2^112 moves the exponent, and a subnormal's too.
  const uint32_t bits = rest >= 0x0f800000u
                            ? rest | 0x7f800000u
                            : std::bit_cast<uint32_t>(std::bit_cast<float>(rest) * 0x1p112f);
  return std::bit_cast<float>(sign | bits);
}

template <class T>
T encode(float x);

template <>
inline bf16 encode<bf16>(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}

template <>
inline f16 encode<f16>(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return {0x7fff};
  if (rest >= 0x477ff000u) {  // 65,520 and more
    rest = 0x7c00;
  } else if (rest < 0x38800000u) {
    // Below 2^-14 the step is 2^-24, that of fp32 at one half: the addition rounds.
    rest = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5f) - 0x3f000000u;
  } else {
    rest = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | rest)};
}

}  // namespace bert_unpad::block_model
