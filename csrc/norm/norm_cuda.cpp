// CUDA bindings of dropout + residual + LayerNorm: checks, outputs, stream.
#include "norm/norm_cuda.h"

#include <optional>
#include <tuple>

#include "common/philox.h"
#include "cuda/binding.h"
#include "norm/arguments.h"

namespace bert_unpad::cuda {
namespace {

NormCudaParams common(const Tensor& x, const std::optional<Tensor>& x_bias,
                      const std::optional<Tensor>& residual, const Tensor& weight, double dropout_p,
                      const std::optional<Tensor>& rng, const char* op) {
  NormCudaParams p{};
  p.norm.rows = check_norm_arguments(x, x_bias, residual, weight, dropout_p, op);
  p.norm.hidden = weight.size(0);
  check_hidden(p.norm.hidden, op);
  p.norm.dtype = storage_dtype(x, op, "x");
  p.norm.parameter_dtype = storage_dtype(weight, op, "weight");
  p.norm.keep_threshold = keep_threshold(dropout_p);
  p.norm.rng = rng_pointer(rng, dropout_p, x, op);
  p.norm.weight = weight.const_data_ptr();
  p.x = x.const_data_ptr();
  p.residual = residual ? residual->const_data_ptr() : nullptr;
  if (x_bias) {
    p.x_bias = x_bias->const_data_ptr();
    p.x_bias_dtype = storage_dtype(*x_bias, op, "x_bias");
  }
  return p;
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor x, std::optional<Tensor> x_bias,
                                           std::optional<Tensor> residual, Tensor weight,
                                           Tensor bias, double dropout_p, double eps,
                                           std::optional<Tensor> rng) {
  const char* op = "dropout_add_layer_norm";
  NormCudaParams p = common(x, x_bias, residual, weight, dropout_p, rng, op);
  check_norm_bias(bias, weight, x, op);
  const Call call(x, op);
  Tensor y = torch::stable::empty_like(x);
  const auto [mean, rstd] = new_statistics(p.norm, x, p.norm.rows);
  p.norm.bias = bias.const_data_ptr();
  p.norm.eps = static_cast<float>(eps);
  p.y = y.mutable_data_ptr();
  dropout_add_layer_norm(p, call.stream);
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor dy, Tensor x, std::optional<Tensor> x_bias, std::optional<Tensor> residual,
    Tensor weight, Tensor mean, Tensor rstd, double dropout_p, std::optional<Tensor> rng) {
  const char* op = "dropout_add_layer_norm_backward";
  NormCudaParams p = common(x, x_bias, residual, weight, dropout_p, rng, op);
  check_like(dy, x, op, "dy", "x");
  set_statistics(p.norm, mean, rstd, p.norm.rows, x, op);
  const Call call(x, op);
  Tensor dx = torch::stable::empty_like(x);
  const bool own_dresidual = residual.has_value() && dropout_p > 0.0;
  Tensor dresidual =
      own_dresidual ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  Tensor dweight = torch::stable::empty_like(weight), dbias = torch::stable::empty_like(weight);
  Tensor dx_bias = x_bias ? torch::stable::empty_like(*x_bias) : torch::stable::new_empty(x, {0});
  p.norm.dy = dy.const_data_ptr();
  p.norm.dweight = dweight.mutable_data_ptr();
  p.norm.dbias = dbias.mutable_data_ptr();
  p.dx = dx.mutable_data_ptr();
  p.dresidual = own_dresidual ? dresidual.mutable_data_ptr() : nullptr;
  p.dx_bias = x_bias ? dx_bias.mutable_data_ptr() : nullptr;
  Tensor partials = torch::stable::new_empty(
      x, {3, dropout_add_layer_norm_partial_rows(p), p.norm.hidden}, ScalarType::Float);
  p.norm.partials = partials.mutable_data_ptr<float>();
  dropout_add_layer_norm_backward(p, call.stream);
  return {dx, dresidual, dx_bias, dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("dropout_add_layer_norm", TORCH_BOX(&forward));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&backward));
}

}  // namespace bert_unpad::cuda
