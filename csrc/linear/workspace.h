// Scratch memory for one call, from PyTorch's allocator, which reuses it in stream order.
#pragma once

#include <vector>

#include "common/allocate.h"
#include "common/checks.h"

namespace bert_unpad::cuda {

class Workspace {
 public:
  explicit Workspace(const Tensor& like) : like_(like) {}

  void* operator()(size_t bytes) {
    memory_.push_back(allocate(like_, {static_cast<int64_t>(bytes)}, ScalarType::Byte));
    return memory_.back().mutable_data_ptr();
  }

 private:
  Tensor like_;
  std::vector<Tensor> memory_;
};

}  // namespace bert_unpad::cuda
