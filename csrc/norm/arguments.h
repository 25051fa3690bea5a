// Checks of dropout_add_layer_norm's arguments, the same on CPU and GPU.
#pragma once

#include "common/norm_arguments.h"

namespace bert_unpad {

inline bool is_plain(const std::optional<Tensor>& x_bias, const std::optional<Tensor>& residual,
                     double dropout_p) {
  return !x_bias && !residual && dropout_p == 0.0;
}

// The function of `bert_unpad.ops` that a call stands for, as errors name it.
inline const char* norm_function(const std::optional<Tensor>& x_bias,
                                 const std::optional<Tensor>& residual, double dropout_p,
                                 bool rms) {
  if (is_plain(x_bias, residual, dropout_p)) return rms ? "rms_norm" : "layer_norm";
  return rms ? "dropout_add_rms_norm" : "dropout_add_layer_norm";
}

// What forward and backward have in common; `name`: what x is called. Returns the number of rows.
inline int64_t check_norm_arguments(const Tensor& x, const std::optional<Tensor>& x_bias,
                                    const std::optional<Tensor>& residual, const Tensor& weight,
                                    double dropout_p, const char* op, const char* name = "x") {
  storage_dtype(x, op, name);
  check(x.dim() >= 1 && x.size(x.dim() - 1) >= 1, op, ": ", name,
        " must have shape [..., hidden] with hidden >= 1, got ", ShapeOf(x));
  check_contiguous(x, op, name);
  const int64_t hidden = x.size(x.dim() - 1);
  if (residual) check_like(*residual, x, op, "residual", "x");
  check_parameter(weight, hidden, x, op, "weight");
  if (x_bias) check_parameter(*x_bias, hidden, x, op, "x_bias");
  check_probability(dropout_p, op, "dropout_p");
  return x.numel() / hidden;
}

// What only the backward pass from the sum has.
inline void check_norm_sum_arguments(const Tensor& dy, const std::optional<Tensor>& dsum,
                                     const Tensor& sum, const std::optional<Tensor>& x_bias,
                                     const Tensor& weight, const char* op) {
  check_like(dy, sum, op, "dy", "sum");
  if (dsum) check_like(*dsum, sum, op, "dsum", "sum");
  if (x_bias) check_parameter(*x_bias, weight.size(0), sum, op, "x_bias");
}

}  // namespace bert_unpad
