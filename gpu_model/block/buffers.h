// The buffers that a test handed over: what kernels may touch of global memory. Everything else is
// out of bounds, also what happens to be mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace bert_unpad::block_model {

class Buffers {
 public:
  void add(const void* p, size_t bytes, bool writable) {
    const auto begin = reinterpret_cast<uintptr_t>(p);
    for (const Buffer& b : buffers_) {
      if (begin < b.end && b.begin < begin + bytes)
        throw std::invalid_argument("the buffer overlaps another registered one");
    }
    if (bytes > 0) buffers_.push_back({begin, begin + bytes, writable});
  }
  void clear() { buffers_.clear(); }

  // Whether [address, address + bytes) lies in one buffer, the address is a multiple of `bytes`,
  // and, for `write`, the buffer may be written.
  bool allow(uintptr_t address, uint32_t bytes, bool write) {
    if (address % bytes != 0) return false;
    // Kernels go back and forth between buffers; pages remember theirs.
    size_t& guess = recent_[address / 4096 % kRecent];
    if (guess >= buffers_.size() || !buffers_[guess].holds(address, bytes))
      guess = find(address, bytes);
    return guess < buffers_.size() && (!write || buffers_[guess].writable);
  }

  // What is wrong with an access that is not allowed.
  std::string problem(const char* what, uintptr_t address, uint32_t bytes) const {
    const std::string access =
        std::string(what) + " of " + std::to_string(bytes) + " bytes of global memory ";
    if (address % bytes != 0) return access + "at an address that is no multiple of that";
    if (find(address, bytes) < buffers_.size()) return access + "in a read-only buffer";
    return access + where(address);
  }

 private:
  struct Buffer {
    uintptr_t begin, end;
    bool writable;
    bool holds(uintptr_t address, uint32_t bytes) const {
      return address >= begin && address < end && end - address >= bytes;
    }
  };

  size_t find(uintptr_t address, uint32_t bytes) const {
    size_t i = 0;
    while (i < buffers_.size() && !buffers_[i].holds(address, bytes)) ++i;
    return i;
  }

  // The buffer that an address outside of all of them is nearest to.
  std::string where(uintptr_t address) const {
    uintptr_t best = 1 << 20;
    std::string text = "far from every buffer";
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const Buffer& b = buffers_[i];
      const bool before = address < b.begin;
      const uintptr_t distance = before ? b.begin - address : address - b.begin;
      if (distance >= best + (before ? 0 : b.end - b.begin)) continue;
      best = before ? distance : address < b.end ? 0 : address - b.end;
      text = "out of bounds: at byte " + std::string(before ? "-" : "") + std::to_string(distance) +
             " of buffer " + std::to_string(i) + ", which has " + std::to_string(b.end - b.begin) +
             " bytes";
    }
    return text;
  }

  std::vector<Buffer> buffers_;
  static constexpr size_t kRecent = 64;
  size_t recent_[kRecent] = {};
};

}  // namespace bert_unpad::block_model
