// What the CUDA bindings share: the device and stream of a call, and argument checks.
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

// Same shape, dtype and device as x; contiguous.
inline void check_like(const Tensor& t, const Tensor& x, const char* op, const char* name) {
  bool same = t.dim() == x.dim();
  for (int64_t i = 0; same && i < t.dim(); ++i) same = t.size(i) == x.size(i);
  check(same, op, ": ", name, " must have the shape of x, ", shape_string(x), ", got ",
        shape_string(t));
  check(t.scalar_type() == x.scalar_type(), op, ": ", name, " must have the dtype of x");
  check_contiguous(t, op, name);
  check_same_device(t, x, op, name);
}

// A parameter: contiguous, [n], on the data's device, in fp32 or the activations' dtype.
inline void check_parameter(const Tensor& t, int64_t n, const Tensor& x, const char* op,
                            const char* name) {
  check(t.dim() == 1 && t.size(0) == n, op, ": ", name, " must have shape [", n, "], got ",
        shape_string(t));
  check(t.scalar_type() == ScalarType::Float || t.scalar_type() == x.scalar_type(), op, ": ", name,
        " must be float32 or of the input's dtype");
  check_contiguous(t, op, name);
  check_same_device(t, x, op, name);
}

}  // namespace bert_unpad::cuda
