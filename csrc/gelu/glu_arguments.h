// Checks of glu's arguments, the same on CPU and GPU.
#pragma once

#include "common/allocate.h"
#include "common/checks.h"
#include "gelu/glu_kind.h"

namespace bert_unpad {

// Fills what CPU and CUDA params have in common, but for the bias; returns the number of rows.
template <class Params>
int64_t set_glu(Params& p, const Tensor& x, const std::optional<Tensor>& bias, int64_t kind,
                const char* op) {
  p.dtype = storage_dtype(x, op, "x");
  check(x.dim() >= 1 && x.size(x.dim() - 1) % 2 == 0, op,
        ": x must have shape [..., 2 * width], got ", ShapeOf(x));
  check_contiguous(x, op, "x");
  check(kind >= 0 && kind < kGluKinds, op, ": kind must be between 0 and ", kGluKinds - 1, ", got ",
        kind);
  p.kind = static_cast<GluKind>(kind);
  p.width = x.size(x.dim() - 1) / 2;
  if (bias) check_parameter(*bias, 2 * p.width, x, op, "bias");
  p.x = x.const_data_ptr();
  return p.width == 0 ? 0 : x.numel() / (2 * p.width);
}

// The first half of x's columns: y's shape.
inline Tensor glu_half(Tensor x) {
  return torch::stable::narrow(x, x.dim() - 1, 0, x.size(x.dim() - 1) / 2);
}

inline void check_glu_gradient(const Tensor& dy, const Tensor& x, const char* op) {
  check_like(dy, glu_half(x), op, "dy", "y");
}

inline Tensor new_glu_result(const Tensor& x) { return allocate(x, glu_half(x).sizes()); }

}  // namespace bert_unpad
