// Checks of the arguments of operators that write 8 bits on a GPU.
#pragma once

#include <optional>
#include <tuple>

#include "common/checks.h"
#include "cuda/fp8_result.h"

namespace bert_unpad::cuda {

inline void check_aligned(const Tensor& t, const char* op, const char* name) {
  check(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, op, ": ", name,
        " must begin at a multiple of 16 bytes");
}

// A matrix that becomes one in 8 bits; sets the sizes of that.
inline void check_fp8_matrix(Fp8Result& p, const Tensor& x, const char* op) {
  check_shape(x, {-1, -1}, op, "x", "[rows, columns]");
  check_contiguous(x, op, "x");
  check(x.size(1) % kFp8Multiple == 0, op, ": x must have a multiple of 16 columns, got ",
        shape_string(x));
  p.rows = x.size(0);
  p.columns = x.size(1);
}

// Allocates both matrices, and sets their pointers.
inline std::tuple<Tensor, Tensor> new_fp8_results(Fp8Result& p, const Tensor& like, ScalarType type,
                                                  bool transpose) {
  Tensor q = torch::stable::new_empty(like, {p.rows, p.columns}, type);
  Tensor q_transposed = torch::stable::new_empty(
      like, {transpose ? p.columns : 0, transpose ? fp8_padded(p.rows) : 0}, type);
  p.q = static_cast<uint8_t*>(q.mutable_data_ptr());
  p.q_transposed = transpose ? static_cast<uint8_t*>(q_transposed.mutable_data_ptr()) : nullptr;
  return {q, q_transposed};
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
