// Checks of dropout_add_layer_norm's arguments, the same on CPU and GPU.
#pragma once

#include "common/norm_arguments.h"

namespace bert_unpad {

// What forward and backward have in common. Returns the number of rows.
inline int64_t check_norm_arguments(const Tensor& x, const std::optional<Tensor>& x_bias,
                                    const std::optional<Tensor>& residual, const Tensor& weight,
                                    double dropout_p, const char* op) {
  storage_dtype(x, op, "x");
  check(x.dim() >= 1 && x.size(x.dim() - 1) >= 1, op,
        ": x must have shape [..., hidden] with hidden >= 1, got ", shape_string(x));
  check_contiguous(x, op, "x");
  const int64_t hidden = x.size(x.dim() - 1);
  if (residual) check_like(*residual, x, op, "residual", "x");
  check_parameter(weight, hidden, x, op, "weight");
  if (x_bias) check_parameter(*x_bias, hidden, x, op, "x_bias");
  check_probability(dropout_p, op, "p");
  return x.numel() / hidden;
}

}  // namespace bert_unpad
