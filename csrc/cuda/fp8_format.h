// fp32 to 8-bit floating point as NVIDIA, Arm and Intel define it (Micikevicius et al., 2022,
// arXiv:2209.05433), rounding to nearest even, too large values to the largest finite one.
//
// One instruction converts two numbers on a GPU from sm_89 on, which has 8-bit products too.
// Elsewhere integer arithmetic gives the same, but for the sign of NaN.
#pragma once

#include <bit>
#include <cstdint>

#include "common/macros.h"
#include "cuda/permute_bytes.h"

namespace bert_unpad {

// Bits of the mantissa, exponent bias and largest finite value.
struct E4M3 {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr float kLargest = 448.0f;
};
struct E5M2 {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr float kLargest = 57344.0f;
};

template <class Format>
BU_HD uint32_t to_fp8(float x) {
  constexpr int kDropped = 23 - Format::kMantissa;
  // The smallest normal value, and a number whose last bit has the weight of a subnormal's: adding
  // it rounds there.
  constexpr float kSmallest = std::bit_cast<float>(uint32_t{128 - Format::kBias} << 23);
  constexpr float kRounder = std::bit_cast<float>(uint32_t{128 - Format::kBias + kDropped} << 23);
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 24 & 0x80u;
  float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
  if (magnitude != magnitude) return sign | 0x7fu;
  magnitude = magnitude < Format::kLargest ? magnitude : Format::kLargest;
  if (magnitude < kSmallest) {
    const float rounded = magnitude + kRounder;
    return sign | (std::bit_cast<uint32_t>(rounded) - std::bit_cast<uint32_t>(kRounder));
  }
  const uint32_t m = std::bit_cast<uint32_t>(magnitude);
  const uint32_t rounded = m + ((1u << (kDropped - 1)) - 1) + (m >> kDropped & 1u);
  return sign | ((rounded >> kDropped) - (uint32_t{127 - Format::kBias} << Format::kMantissa));
}

// Two numbers, as the lower and the upper byte.
template <class Format>
BU_HD uint32_t to_fp8_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  if constexpr (Format::kMantissa == E4M3::kMantissa)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return to_fp8<Format>(low) | to_fp8<Format>(high) << 8;
#endif
}

// Four numbers, the first as the lowest byte.
template <class Format>
BU_HD uint32_t to_fp8_word(const float (&x)[4]) {
  return permute_bytes(to_fp8_pair<Format>(x[0], x[1]), to_fp8_pair<Format>(x[2], x[3]), 0x5410u);
}

}  // namespace bert_unpad
