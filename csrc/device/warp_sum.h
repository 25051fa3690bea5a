// warp_sum, as in reduce.h, of other types than float.
#pragma once

#include <bit>
#include <cstdint>

#include "device/macros.h"
#include "device/primitives.h"

namespace bert_unpad {

BU_DEVICE uint32_t warp_sum(uint32_t x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

// Shuffles take 32 bits: 64 go in two halves.
BU_DEVICE double warp_sum(double x) {
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
