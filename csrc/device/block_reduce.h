// Reductions over a warp, each in an order that depends on the lanes alone: the same inputs give
// the same bits. The result is in all lanes, and all 32 must call.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "device/macros.h"
#include "device/primitives.h"

namespace bert_unpad {

// A NaN counts only where there is nothing else.
BU_DEVICE float max_over_warp(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
  return x;
}

BU_DEVICE float sum_over_warp(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

BU_DEVICE uint32_t sum_over_warp(uint32_t x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

// Shuffles take 32 bits: 64 go in two halves.
BU_DEVICE double sum_over_warp(double x) {
  struct Halves {
    uint32_t a, b;
  };
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const auto own = std::bit_cast<Halves>(x);
    x += std::bit_cast<double>(Halves{shuffle_xor(own.a, mask), shuffle_xor(own.b, mask)});
  }
  return x;
}

}  // namespace bert_unpad
