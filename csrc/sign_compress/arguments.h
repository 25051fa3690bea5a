// Checks of the arguments of the sign_* operators, the same on CPU and GPU.
#pragma once

#include <cmath>
#include <optional>

#include "common/checks.h"

namespace bert_unpad {

inline int64_t packed_bytes(int64_t size) { return (size + 7) / 8; }

inline const float* optional_scalar(const std::optional<Tensor>& t, const Tensor& like,
                                    const char* op, const char* name) {
  if (!t) return nullptr;
  check_scalar(*t, ScalarType::Float, like, op, name, "float32");
  return t->const_data_ptr<float>();
}

inline void check_float(const Tensor& t, const Tensor& like, const char* op, const char* name) {
  check_dtype(t, ScalarType::Float, op, name, "float32");
  check_contiguous(t, op, name);
  check_same_device(t, like, op, name);
}

// What is compressed: value + error.
struct SignArguments {
  DType dtype = DType::kFloat32;
  int64_t size;
  const void* value = nullptr;
  float* error;

  SignArguments(const std::optional<Tensor>& value_tensor, const Tensor& error_tensor,
                const char* op)
      : size(error_tensor.numel()) {
    check_float(error_tensor, error_tensor, op, "error");
    error = const_cast<float*>(error_tensor.const_data_ptr<float>());
    if (!value_tensor) return;
    dtype = storage_dtype(*value_tensor, op, "value");
    check_contiguous(*value_tensor, op, "value");
    check_same_device(*value_tensor, error_tensor, op, "value");
    check(value_tensor->numel() == size, op, ": value must have as many elements as error, ", size,
          ", got ", value_tensor->numel());
    value = value_tensor->const_data_ptr();
  }
};

inline uint8_t* packed_bits(const Tensor& bits, const Tensor& error, const char* op) {
  check_shape(bits, {packed_bytes(error.numel())}, op, "bits", "[ceil(elements of error / 8)]");
  check_dtype(bits, ScalarType::Byte, op, "bits", "uint8");
  check_contiguous(bits, op, "bits");
  check_same_device(bits, error, op, "bits");
  return bits.mutable_data_ptr<uint8_t>();
}

// Bits of several ranks, or several parts, one row each, and where their signs go.
struct SignRows {
  const uint8_t* bits;
  int64_t rows, stride, size;
  const float* scales;
  float* out;

  // `rows_follow`: the rows are parts of `out`, one after the other; else each is all of it.
  SignRows(const Tensor& bits_tensor, const Tensor& scales_tensor, const Tensor& out_tensor,
           bool rows_follow, const char* op) {
    check_shape(bits_tensor, {-1, -1}, op, "bits", "[rows, bytes]");
    check_dtype(bits_tensor, ScalarType::Byte, op, "bits", "uint8");
    check_contiguous(bits_tensor, op, "bits");
    check_float(out_tensor, bits_tensor, op, "out");
    rows = bits_tensor.size(0);
    stride = bits_tensor.size(1);
    size = out_tensor.numel();
    check(rows >= 1, op, ": bits must have at least one row");
    check_shape(scales_tensor, {rows}, op, "scales", "[rows of bits]");
    check_float(scales_tensor, bits_tensor, op, "scales");
    const int64_t room = 8 * stride * (rows_follow ? rows : 1);
    check(size <= room, op, ": out must have at most ", room, " elements, for which there are bits",
          ", got ", size);
    bits = bits_tensor.const_data_ptr<uint8_t>();
    scales = scales_tensor.const_data_ptr<float>();
    out = out_tensor.mutable_data_ptr<float>();
  }
};

inline void check_factor(double factor, const char* op) {
  check(std::isfinite(factor), op, ": factor must be finite, got ", factor);
}

}  // namespace bert_unpad
