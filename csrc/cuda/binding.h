// What the CUDA bindings share: the device and stream of a call, and its random numbers.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "common/checks.h"
#include "cuda/error.h"
#include "cuda/stream.h"

namespace bert_unpad::cuda {

// Makes the tensor's device current for the scope of a call.
struct Call {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  Call(const Tensor& t, const char* op)
      : guard(t.get_device_index()), stream(current_stream(t.get_device_index(), op)) {
    // The guard speaks to PyTorch's CUDA runtime, kernels are launched by the one linked in here.
    int device = -1;
    check_cuda(cudaGetDevice(&device), op);
    if (device != t.get_device_index()) check_cuda(cudaSetDevice(t.get_device_index()), op);
  }
};

// The (seed, offset) of a call with dropout, on the device; null without.
inline const int64_t* rng_pointer(const std::optional<Tensor>& rng, double dropout_p,
                                  const Tensor& like, const char* op) {
  if (dropout_p == 0.0) return nullptr;
  check(rng.has_value(), op, ": rng (int64 [2]: seed, offset) is needed with dropout");
  check_shape(*rng, {2}, op, "rng", "[2]");
  check_dtype(*rng, ScalarType::Long, op, "rng", "int64");
  check_contiguous(*rng, op, "rng");
  check_same_device(*rng, like, op, "rng");
  return rng->const_data_ptr<int64_t>();
}

// Columns are counted in 32 bits, with room for a block's worth more.
inline void check_hidden(int64_t hidden, const char* op) {
  check(hidden <= int64_t{1} << 30, op, ": hidden must be at most 2^30 on a GPU, got ", hidden);
}

}  // namespace bert_unpad::cuda
