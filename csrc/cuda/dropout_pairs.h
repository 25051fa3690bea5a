// Dropout's decisions on a GPU, two at a time: half-words of a Philox call (common/philox.h) are
// compared as pairs of half-precision numbers.
#pragma once

#include "common/philox.h"
#include "cuda/permute_bytes.h"
#include "cuda/primitives.h"

namespace bert_unpad {

// All ones in each half of `pair` that is below the same half of `limits`, as half-precision
// numbers.
BU_HD uint32_t halves_below(uint32_t pair, uint32_t limits) {
#ifdef __CUDA_ARCH__
  uint32_t mask;
  asm("set.lt.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(pair), "r"(limits));
  return mask;
#else
  uint32_t mask = 0;
  if (half_rank(pair & 0xffffu) < half_rank(limits & 0xffffu)) mask |= 0x0000ffffu;
  if (half_rank(pair >> 16) < half_rank(limits >> 16)) mask |= 0xffff0000u;
  return mask;
#endif
}

// Half of a call's 16 decisions, as pairs: the first 8, or the last 8.
BU_HD Philox4 eight_decisions(const Philox4& bits, bool last) {
  Philox4 pairs;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pairs.w[i] = last ? permute_bytes(bits.w[i], bits.w[(i + 1) % 4], 0x4321u) : bits.w[i];
  return pairs;
}

// The rule of common/philox.h for pairs. `held`: kept in registers; otherwise nvcc may work it out
// again at each use (9 instructions), for kernels that have no registers to spare.
struct PairRule {
  uint32_t limits, flip;

  BU_DEVICE explicit PairRule(uint32_t threshold, bool held = true) {
    const KeepRule rule = keep_rule(threshold);
    limits = rule.limit * 0x10001u;
    flip = rule.flip;
    if (held) {
      limits = keep_in_register(limits);
      flip = keep_in_register(flip);
    }
  }

  // All ones in each half whose decision is to keep.
  BU_DEVICE uint32_t kept(uint32_t pair) const { return halves_below(pair, limits) ^ flip; }

  // Zeroes `low` and `high` where the lower and upper half decide to drop.
  BU_DEVICE void apply(float& low, float& high, uint32_t pair) const {
#ifdef __CUDA_ARCH__
    asm("{\n"
        ".reg .pred flips, low, high;\n"
        "setp.ne.u32 flips, %4, 0;\n"
        "setp.lt.xor.f16x2 low|high, %2, %3, flips;\n"
        "selp.f32 %0, %0, 0f00000000, low;\n"
        "selp.f32 %1, %1, 0f00000000, high;\n"
        "}"
        : "+f"(low), "+f"(high)
        : "r"(pair), "r"(limits), "r"(flip));
#else
    const uint32_t mask = kept(pair);
    if ((mask & 0xffffu) == 0) low = 0.0f;
    if ((mask >> 16) == 0) high = 0.0f;
#endif
  }
};

// An operator's (seed, offset), read here and not on the host, so that a captured graph can advance
// it.
BU_DEVICE RngKey load_rng_key(const int64_t* rng) {
  if (rng == nullptr) return {};
  return rng_key(load_global<int64_t>(rng), load_global<int64_t>(rng + 1));
}

}  // namespace bert_unpad
