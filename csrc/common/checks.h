// Argument checks and small tensor helpers that the CPU and CUDA bindings share.
//
// Errors are std::runtime_error (Python's RuntimeError) and name the operator and the argument.
// From PyTorch 2.15 on the stable ABI keeps an exception's message but not its type: every
// exception becomes RuntimeError, as those of TORCH_CHECK do in all versions.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "common/types.h"

namespace bert_unpad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Args>
inline void check(bool ok, const Args&... message) {
  if (ok) [[likely]]
    return;
  std::ostringstream text;
  (text << ... << message);
  throw std::runtime_error(text.str());
}

// A tensor's shape in a message, which is written only where a check fails: an operator makes a
// dozen of them.
struct ShapeOf {
  const Tensor& tensor;
  explicit ShapeOf(const Tensor& t) : tensor(t) {}

  friend std::ostream& operator<<(std::ostream& out, const ShapeOf& shape) {
    out << '[';
    for (int64_t i = 0; i < shape.tensor.dim(); ++i) out << (i ? ", " : "") << shape.tensor.size(i);
    return out << ']';
  }
};

// -1 in `sizes` matches anything.
inline void check_shape(const Tensor& t, std::initializer_list<int64_t> sizes, const char* op,
                        const char* name, const char* expected) {
  bool ok = t.dim() == static_cast<int64_t>(sizes.size());
  int64_t i = 0;
  for (int64_t size : sizes) {
    if (!ok) break;
    ok = size < 0 || t.size(i) == size;
    ++i;
  }
  check(ok, op, ": ", name, " must have shape ", expected, ", got ", ShapeOf(t));
}

// Checks that the storage has all the memory that sizes and strides describe. It does not after
// `untyped_storage().resize_(0)`, which frees it while the tensor lives on; reading would crash.
inline void check_storage(const Tensor& t, const char* op, const char* name) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t last = t.storage_offset(), bytes = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return;
    last += (sizes[i] - 1) * strides[i];
  }
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
  const auto needed = (last + 1) * static_cast<int64_t>(t.element_size());
  check(bytes >= needed, op, ": ", name, " must have a storage of at least ", needed,
        " bytes for shape ", ShapeOf(t), ", got one of ", bytes, "; was it freed?");
}

inline void check_contiguous(const Tensor& t, const char* op, const char* name) {
  check(t.is_contiguous(), op, ": ", name, " must be contiguous");
  check_storage(t, op, name);
}

inline void check_dtype(const Tensor& t, ScalarType dtype, const char* op, const char* name,
                        const char* expected) {
  check(t.scalar_type() == dtype, op, ": ", name, " must be ", expected);
}

inline void check_same_device(const Tensor& t, const Tensor& like, const char* op,
                              const char* name) {
  check(t.is_cpu() == like.is_cpu() && t.is_cuda() == like.is_cuda() &&
            t.get_device_index() == like.get_device_index(),
        op, ": ", name, " must be on the same device as the other tensors");
}

// One number of `dtype` on the device of `like`.
inline void check_scalar(const Tensor& t, ScalarType dtype, const Tensor& like, const char* op,
                         const char* name, const char* expected) {
  check(t.numel() == 1, op, ": ", name, " must have one element, got ", ShapeOf(t));
  check_dtype(t, dtype, op, name, expected);
  check_same_device(t, like, op, name);
  check_storage(t, op, name);
}

// fp32, bf16 or fp16; anything else is an error.
inline DType storage_dtype(const Tensor& t, const char* op, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      throw std::runtime_error(std::string(op) + ": " + name +
                               " must be float32, bfloat16 or float16");
  }
}

// Shape, dtype and device of `like`, contiguous.
inline void check_like(const Tensor& t, const Tensor& like, const char* op, const char* name,
                       const char* like_name) {
  bool same = t.dim() == like.dim();
  for (int64_t i = 0; same && i < t.dim(); ++i) same = t.size(i) == like.size(i);
  check(same, op, ": ", name, " must have the shape of ", like_name, ", ", ShapeOf(like), ", got ",
        ShapeOf(t));
  check(t.scalar_type() == like.scalar_type(), op, ": ", name, " must have the dtype of ",
        like_name);
  check_contiguous(t, op, name);
  check_same_device(t, like, op, name);
}

// Contiguous, [n], on the data's device.
inline void check_vector(const Tensor& t, int64_t n, const Tensor& like, const char* op,
                         const char* name) {
  check(t.dim() == 1 && t.size(0) == n, op, ": ", name, " must have shape [", n, "], got ",
        ShapeOf(t));
  check_contiguous(t, op, name);
  check_same_device(t, like, op, name);
}

// A parameter: such a vector in fp32 or the activations' dtype.
inline void check_parameter(const Tensor& t, int64_t n, const Tensor& like, const char* op,
                            const char* name) {
  check_vector(t, n, like, op, name);
  check(t.scalar_type() == ScalarType::Float || t.scalar_type() == like.scalar_type(), op, ": ",
        name, " must be float32 or of the input's dtype");
}

inline void check_probability(double p, const char* op, const char* name) {
  check(p >= 0.0 && p < 1.0, op, ": ", name, " must be in [0, 1), got ", p);
}

}  // namespace bert_unpad
