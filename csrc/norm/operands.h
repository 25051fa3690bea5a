// Checks of the operands of operators with a LayerNorm, the same on CPU and GPU.
#pragma once

#include <utility>

#include "common/checks.h"

namespace bert_unpad {

// Of dropout_add_layer_norm, what forward and backward have in common. Returns the number of rows.
inline int64_t check_norm_operands(const Tensor& x, const std::optional<Tensor>& x_bias,
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

// The LayerNorm's bias; `prefix` is "" or "ln_".
inline void check_norm_bias(const Tensor& bias, const Tensor& weight, const Tensor& like,
                            const char* op, const std::string& prefix = "") {
  check_parameter(bias, weight.size(0), like, op, (prefix + "bias").c_str());
  check(bias.scalar_type() == weight.scalar_type(), op, ": ", prefix,
        "bias must have the dtype of ", prefix, "weight");
}

// The mean or the reciprocal standard deviation of every row: fp32 [rows], contiguous.
inline void check_statistics(const Tensor& t, int64_t rows, const Tensor& like, const char* op,
                             const char* name) {
  check_shape(t, {rows}, op, name, "[rows]");
  check_dtype(t, ScalarType::Float, op, name, "float32");
  check_contiguous(t, op, name);
  check_same_device(t, like, op, name);
}

// Allocates both, for the forward pass; `p` is a params struct with their pointers.
template <class Params>
std::pair<Tensor, Tensor> new_statistics(Params& p, const Tensor& like, int64_t rows) {
  Tensor mean = torch::stable::new_empty(like, {rows}, ScalarType::Float);
  Tensor rstd = torch::stable::new_empty(like, {rows}, ScalarType::Float);
  p.mean = mean.mutable_data_ptr<float>();
  p.rstd = rstd.mutable_data_ptr<float>();
  return {mean, rstd};
}

// Checks both as the backward pass gets them, and sets their pointers.
template <class Params>
void set_statistics(Params& p, const Tensor& mean, const Tensor& rstd, int64_t rows,
                    const Tensor& like, const char* op) {
  check_statistics(mean, rows, like, op, "mean");
  check_statistics(rstd, rows, like, op, "rstd");
  p.mean = const_cast<float*>(mean.const_data_ptr<float>());
  p.rstd = const_cast<float*>(rstd.const_data_ptr<float>());
}

}  // namespace bert_unpad
