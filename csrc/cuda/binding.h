// What the CUDA bindings share: the device and stream of a call.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include "checks.h"
#include "cuda/stream.h"

namespace bert_unpad::cuda {

// Makes the tensor's device current for the scope of a call.
struct Call {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  Call(const Tensor& t, const char* op)
      : guard(t.get_device_index()), stream(current_stream(t.get_device_index(), op)) {}
};

}  // namespace bert_unpad::cuda
