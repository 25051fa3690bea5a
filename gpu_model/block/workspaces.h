// Memory that the caller of a product takes from PyTorch's allocator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "gpu_model/block/global_memory.h"

namespace bert_unpad::block_model {

class Workspaces {
 public:
  void clear() {
    memory_.clear();
    bytes_ = 0;
  }

  // Aligned as by that allocator; full of NaN.
  void* take(size_t bytes) {
    const size_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    memory_.emplace_back(std::aligned_alloc(kAlignment, whole));
    std::memset(memory_.back().get(), 0xff, bytes);
    global_memory.add(memory_.back().get(), bytes, true);
    bytes_ += static_cast<int64_t>(bytes);
    return memory_.back().get();
  }

  // Taken since `clear`.
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kAlignment = 512;
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };

  std::vector<std::unique_ptr<void, Free>> memory_;
  int64_t bytes_ = 0;
};

}  // namespace bert_unpad::block_model
