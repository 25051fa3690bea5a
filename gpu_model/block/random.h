// What a GPU leaves open is drawn from a seed.
#pragma once

#ifdef __BMI2__
#include <immintrin.h>
#endif

#include <bit>
#include <cstdint>

namespace bert_unpad::block_model {

// Who goes on when a thread, or a compiled kernel's warp, waits; block.h says more.
enum class Policy { kInOrder, kUniform, kWarpFirst };

// SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
class Random {
 public:
  explicit Random(uint64_t seed = 0) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // The number of one of the bits that are set, each with the same probability.
  unsigned bit_of(uint32_t mask) {
    const auto count = static_cast<uint64_t>(std::popcount(mask));
    auto skip = static_cast<unsigned>((next() >> 32) * count >> 32);
#ifdef __BMI2__
    mask = _pdep_u32(1u << skip, mask);
#else
    for (; skip > 0; --skip) mask &= mask - 1;
#endif
    return static_cast<unsigned>(std::countr_zero(mask));
  }

 private:
  uint64_t state_;
};

}  // namespace bert_unpad::block_model
