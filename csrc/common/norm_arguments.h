// Checks of the bias and the statistics of a LayerNorm, for every operator that has one, the same
// on CPU and GPU.
#pragma once

#include <utility>

#include "common/allocate.h"
#include "common/checks.h"

namespace bert_unpad {

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

// Allocates both, for the forward pass; `p` is a params struct with their pointers. RMSNorm has no
// mean: the tensor is empty, and the pointer null.
template <class Params>
std::pair<Tensor, Tensor> new_statistics(Params& p, const Tensor& like, int64_t rows,
                                         bool rms = false) {
  Tensor mean = allocate(like, {rms ? 0 : rows}, ScalarType::Float);
  Tensor rstd = allocate(like, {rows}, ScalarType::Float);
  p.mean = rms ? nullptr : mean.mutable_data_ptr<float>();
  p.rstd = rstd.mutable_data_ptr<float>();
  return {mean, rstd};
}

// Checks both as the backward pass gets them, and sets their pointers.
template <class Params>
void set_statistics(Params& p, const std::optional<Tensor>& mean, const Tensor& rstd, int64_t rows,
                    const Tensor& like, const char* op) {
  if (mean) check_statistics(*mean, rows, like, op, "mean");
  check_statistics(rstd, rows, like, op, "rstd");
  p.mean = mean ? const_cast<float*>(mean->const_data_ptr<float>()) : nullptr;
  p.rstd = const_cast<float*>(rstd.const_data_ptr<float>());
}

}  // namespace bert_unpad
