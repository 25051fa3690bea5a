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

#include "common/splitmix64.h"

namespace bert_unpad::balancer {

class Rng {
 public:
  Rng(std::initializer_list<uint64_t> key) {
    for (uint64_t word : key) state_ = splitmix64(state_ + splitmix64(word));
  }

  uint64_t next() {
    const uint64_t number = splitmix64(state_);
    state_ += kSplitMixGamma;
    return number;
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
  uint64_t state_ = 0;
};

}  // namespace bert_unpad::balancer
