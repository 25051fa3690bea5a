// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014): as
// a stream of numbers, or as a function of coordinates. `bert_unpad/data/random_hash.py` has the
// same function for arrays.
#pragma once

#include <cstdint>

namespace bert_unpad {

inline constexpr uint64_t kSplitMixGamma = 0x9e3779b97f4a7c15ull;  // 2^64 / golden ratio

// The number that follows on state `x`.
constexpr uint64_t splitmix64(uint64_t x) {
  x += kSplitMixGamma;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace bert_unpad
