// CUDA bindings of dropout + residual + LayerNorm: checks, outputs, stream.
#include "norm/norm_cuda.h"
#include "common/allocate.h"

#include <optional>
#include <tuple>

#include "common/philox.h"
#include "cuda/binding.h"
#include "cuda/fp8_arguments.h"
#include "cuda/tickets.h"
#include "norm/arguments.h"

namespace bert_unpad::cuda {
namespace {

NormCudaParams common(const Tensor& x, const std::optional<Tensor>& x_bias,
                      const std::optional<Tensor>& residual, const Tensor& weight, double dropout_p,
                      const std::optional<Tensor>& rng, const char* op, const char* name = "x") {
  NormCudaParams p{};
  p.norm.rows = check_norm_arguments(x, x_bias, residual, weight, dropout_p, op, name);
  p.norm.hidden = weight.size(0);
  check_hidden(p.norm.hidden, op);
  p.norm.dtype = storage_dtype(x, op, name);
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

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// What only the forward pass has.
Results set_forward(NormCudaParams& p, const Tensor& x, const Tensor& weight,
                    const std::optional<Tensor>& bias, double eps, bool rms, bool return_sum,
                    const char* op) {
  if (bias) check_norm_bias(*bias, weight, x, op);
  Tensor y = allocate_like(x);
  Tensor sum = return_sum ? allocate_like(x) : allocate(x, {0});
  const auto [mean, rstd] = new_statistics(p.norm, x, p.norm.rows, rms);
  p.norm.bias = bias ? bias->const_data_ptr() : nullptr;
  p.norm.eps = static_cast<float>(eps);
  p.y = y.mutable_data_ptr();
  p.sum = return_sum ? sum.mutable_data_ptr() : nullptr;
  return {y, sum, mean, rstd};
}

Results forward(Tensor x, std::optional<Tensor> x_bias, std::optional<Tensor> residual,
                Tensor weight, std::optional<Tensor> bias, double dropout_p, double eps,
                std::optional<Tensor> rng, bool rms, bool return_sum) {
  const char* op = norm_function(x_bias, residual, dropout_p, rms);
  NormCudaParams p = common(x, x_bias, residual, weight, dropout_p, rng, op);
  const Call call(x, op);
  const Results results = set_forward(p, x, weight, bias, eps, rms, return_sum, op);
  dropout_add_layer_norm(p, call.stream);
  return results;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> fp8_forward(
    Tensor x, std::optional<Tensor> x_bias, std::optional<Tensor> residual, Tensor weight,
    std::optional<Tensor> bias, double dropout_p, double eps, std::optional<Tensor> rng, bool rms,
    bool return_sum, Tensor scale, std::optional<Tensor> largest, bool transpose) {
  const char* op = "dropout_add_layer_norm_fp8";
  NormFp8Params p{common(x, x_bias, residual, weight, dropout_p, rng, op),
                  {},
                  check_scale(scale, x, op),
                  check_largest(largest, x, op)};
  set_fp8_sizes(p.fp8, x, op);
  const Call call(x, op);
  const Results results = set_forward(p, x, weight, bias, eps, rms, return_sum, op);
  const auto in_8_bits = allocate_fp8_results(p.fp8, x, false, transpose);
  dropout_add_layer_norm_fp8(p, call.stream);
  return std::tuple_cat(results, in_8_bits);
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// `p` has everything but results; `own_dresidual`: that gradient is not dx.
Gradients run_backward(NormCudaParams& p, const Tensor& x, const std::optional<Tensor>& x_bias,
                       const Tensor& weight, bool bias, bool own_dresidual, const char* op) {
  const Call call(x, op);
  const Tensor none = allocate(x, {0});
  Tensor dx = allocate_like(x);
  Tensor dresidual = own_dresidual ? allocate_like(x) : none;
  Tensor dweight = allocate_like(weight);
  Tensor dbias = bias ? allocate_like(weight) : none;
  Tensor dx_bias = x_bias ? allocate_like(*x_bias) : none;
  p.norm.dweight = dweight.mutable_data_ptr();
  p.norm.dbias = bias ? dbias.mutable_data_ptr() : nullptr;
  p.dx = dx.mutable_data_ptr();
  p.dresidual = own_dresidual ? dresidual.mutable_data_ptr() : nullptr;
  if (x_bias) {
    p.dx_bias = dx_bias.mutable_data_ptr();
    p.x_bias_dtype = storage_dtype(*x_bias, op, "x_bias");
  }
  const ColumnScratch scratch = dropout_add_layer_norm_scratch(p);
  Tensor partials = allocate(x, {3, scratch.rows, p.norm.hidden}, ScalarType::Float);
  p.norm.partials = partials.mutable_data_ptr<float>();
  p.norm.tickets = tickets(op, call.stream, scratch.tickets);
  dropout_add_layer_norm_backward(p, call.stream);
  return {dx, dresidual, dx_bias, dweight, dbias};
}

Gradients backward(Tensor dy, Tensor x, std::optional<Tensor> x_bias,
                   std::optional<Tensor> residual, Tensor weight, std::optional<Tensor> mean,
                   Tensor rstd, double dropout_p, std::optional<Tensor> rng, bool bias) {
  const char* op = "dropout_add_layer_norm_backward";
  NormCudaParams p = common(x, x_bias, residual, weight, dropout_p, rng, op);
  check_like(dy, x, op, "dy", "x");
  set_statistics(p.norm, mean, rstd, p.norm.rows, x, op);
  p.norm.dy = dy.const_data_ptr();
  return run_backward(p, x, x_bias, weight, bias, residual && dropout_p > 0.0, op);
}

Gradients sum_backward(Tensor dy, std::optional<Tensor> dsum, Tensor sum,
                       std::optional<Tensor> x_bias, Tensor weight, std::optional<Tensor> mean,
                       Tensor rstd, double dropout_p, std::optional<Tensor> rng, bool bias,
                       bool residual) {
  const char* op = "dropout_add_norm_sum_backward";
  NormCudaParams p = common(sum, {}, {}, weight, dropout_p, rng, op, "sum");
  check_norm_sum_arguments(dy, dsum, sum, x_bias, weight, op);
  set_statistics(p.norm, mean, rstd, p.norm.rows, sum, op);
  p.of_sum = true;
  p.norm.dy = dy.const_data_ptr();
  p.dsum = dsum ? dsum->const_data_ptr() : nullptr;
  return run_backward(p, sum, x_bias, weight, bias, residual && dropout_p > 0.0, op);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("dropout_add_layer_norm", TORCH_BOX(&forward));
  m.impl("dropout_add_layer_norm_fp8", TORCH_BOX(&fp8_forward));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&backward));
  m.impl("dropout_add_norm_sum_backward", TORCH_BOX(&sum_backward));
}

}  // namespace bert_unpad::cuda
