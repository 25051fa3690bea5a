// One instruction on a GPU.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace bert_unpad {

// Bytes of `a` (0 to 3) and `b` (4 to 7) picked by the four nibbles of `selector`.
BU_HD uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  const uint64_t bytes = (static_cast<uint64_t>(b) << 32) | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<uint32_t>((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 0xff) << (8 * i);
  return out;
#endif
}

}  // namespace bert_unpad
