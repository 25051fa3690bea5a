// Keyed random numbers for the balancer.
//
// Every random choice draws from a stream named by integers (seed, epoch, purpose, ...), so that
// all ranks make the same choices without talking to each other, and a rank can repeat the choices
// of one pool without replaying the ones before it. The standard library's distributions are not
// used: their results differ between implementations, and ranks may run on different systems.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>

namespace bert_unpad::balancer {

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
class Rng {
 public:
  Rng(std::initializer_list<uint64_t> key) {
    for (uint64_t word : key) state_ = mix(state_ + kGamma + mix(word + kGamma));
  }

  uint64_t next() {
    state_ += kGamma;
    return mix(state_);
  }

  // Uniform in [0, n), n >= 1, without modulo bias (Lemire: Fast random integer generation in an
  // interval, ACM TOMACS 2019).
  uint32_t below(uint32_t n) {
    uint64_t product = (next() >> 32) * n;
    if (static_cast<uint32_t>(product) < n) {
      const uint32_t threshold = -n % n;
      while (static_cast<uint32_t>(product) < threshold) product = (next() >> 32) * n;
    }
    return static_cast<uint32_t>(product >> 32);
  }

  // Fisher-Yates. Fewer than 2^32 items.
  template <typename T>
  void shuffle(std::span<T> items) {
    for (size_t i = items.size(); i > 1; --i) {
      std::swap(items[i - 1], items[below(static_cast<uint32_t>(i))]);
    }
  }

 private:
  static constexpr uint64_t kGamma = 0x9e3779b97f4a7c15ull;

  static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }

  uint64_t state_ = 0;
};

}  // namespace bert_unpad::balancer
