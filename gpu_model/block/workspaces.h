// Memory that the caller of a product takes from PyTorch's allocator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpu_model/block/global_memory.h"

namespace bert_unpad::block_model {

class Workspaces {
 public:
  void clear() { memory_.clear(); }

  void* take(size_t bytes) {
    std::vector<char>& taken = memory_.emplace_back(bytes);
    global_memory.add(taken.data(), bytes, true);
    return taken.data();
  }

  // Taken since `clear`.
  int64_t bytes() const {
    int64_t sum = 0;
    for (const std::vector<char>& taken : memory_) sum += static_cast<int64_t>(taken.size());
    return sum;
  }

 private:
  std::vector<std::vector<char>> memory_;
};

}  // namespace bert_unpad::block_model
