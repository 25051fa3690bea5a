// Checks of the arguments of operators that write 8 bits on a GPU.
#pragma once

#include <optional>

#include "common/checks.h"
#include "cuda/fp8_result.h"

namespace bert_unpad::cuda {

inline void check_aligned(const Tensor& t, const char* op, const char* name) {
  check(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, op, ": ", name,
        " must begin at a multiple of 16 bytes");
}

// A scale that is given: float32 [].
inline const float* check_scale(const Tensor& t, const Tensor& like, const char* op) {
  check_scalar(t, ScalarType::Float, like, op, "scale", "float32");
  return t.const_data_ptr<float>();
}

// Where the largest values are kept: float32 [kFp8Largest]; null where there is none.
inline float* check_largest(const std::optional<Tensor>& t, const Tensor& like, const char* op) {
  if (!t) return nullptr;
  check_shape(*t, {kFp8Largest}, op, "largest", "[1024]");
  check_dtype(*t, ScalarType::Float, op, "largest", "float32");
  check_contiguous(*t, op, "largest");
  check_same_device(*t, like, op, "largest");
  return t->mutable_data_ptr<float>();
}

}  // namespace bert_unpad::cuda
