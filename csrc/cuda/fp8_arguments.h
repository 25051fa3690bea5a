// Arguments and results of operators that write 8 bits on a GPU: checks, allocation.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "common/allocate.h"
#include "common/checks.h"
#include "cuda/fp8_result.h"

namespace bert_unpad::cuda {

inline void check_aligned(const Tensor& t, const char* op, const char* name) {
  check(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, op, ": ", name,
        " must begin at a multiple of 16 bytes");
}

// A matrix that becomes 8 bits: x [rows, columns], columns a multiple of 16. Sets the sizes.
inline void set_fp8_sizes(Fp8Result& p, const Tensor& x, const char* op) {
  check_shape(x, {-1, -1}, op, "x", "[rows, columns]");
  check_contiguous(x, op, "x");
  check(x.size(1) % kFp8Multiple == 0, op, ": x must have a multiple of 16 columns, got ",
        ShapeOf(x));
  p.rows = x.size(0);
  p.columns = x.size(1);
}

// The same of a matrix that is read 16 bytes at a time: fp32, bf16 or fp16.
template <class Params>
void set_fp8_operand(Params& p, const Tensor& x, const char* op) {
  set_fp8_sizes(p, x, op);
  check_aligned(x, op, "x");
  p.dtype = storage_dtype(x, op, "x");
  p.x = x.const_data_ptr();
}

// Allocates q and q_transposed, which is empty where it is not wanted, and sets their pointers.
// Needs the sizes; call it after `Call` has made the device of x current.
inline std::tuple<Tensor, Tensor> allocate_fp8_results(Fp8Result& p, const Tensor& x, bool e5m2,
                                                       bool transpose) {
  const ScalarType type = e5m2 ? ScalarType::Float8_e5m2 : ScalarType::Float8_e4m3fn;
  Tensor q = allocate(x, {p.rows, p.columns}, type);
  Tensor q_transposed =
      allocate(x, {transpose ? p.columns : 0, transpose ? fp8_padded(p.rows) : 0}, type);
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
