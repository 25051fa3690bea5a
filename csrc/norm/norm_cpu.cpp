// CPU bindings of dropout + residual + LayerNorm or RMSNorm: checks, row chunks, dispatch.
#include <tuple>

#include "common/allocate.h"
#include "common/checks.h"
#include "cpu/parallel.h"
#include "cpu/rng.h"
#include "cpu/rows.h"
#include "norm/arguments.h"
#include "norm/norm.h"

namespace bert_unpad {

namespace {

// The parameter vectors as the kernels read them; NormCpuParams points into it.
struct Vectors {
  std::vector<float> x_bias, weight, bias;
};

// What forward and backward have in common. Returns the number of rows.
int64_t set_common(NormCpuParams& p, Vectors& vectors, const Tensor& x,
                   const std::optional<Tensor>& x_bias, const std::optional<Tensor>& residual,
                   const Tensor& weight, double dropout_p, const std::optional<Tensor>& rng,
                   const char* op, const char* name = "x") {
  const int64_t rows = check_norm_arguments(x, x_bias, residual, weight, dropout_p, op, name);
  p.dtype = storage_dtype(x, op, name);
  p.hidden = weight.size(0);
  p.padded = padded_columns(p.hidden);
  p.keep_threshold = keep_threshold(dropout_p);
  if (dropout_p > 0.0) p.rng = read_rng(rng, op);
  vectors.x_bias = padded_vector(x_bias, p.hidden);
  vectors.weight = padded_vector(weight, p.hidden);
  p.x = x.const_data_ptr();
  p.residual = residual ? residual->const_data_ptr() : nullptr;
  p.x_bias = vectors.x_bias.data();
  p.weight = vectors.weight.data();
  return rows;
}

int64_t scratch_floats(const NormCpuParams& p) { return 2 * p.padded + word_floats(p.hidden); }

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm(
    Tensor x, std::optional<Tensor> x_bias, std::optional<Tensor> residual, Tensor weight,
    std::optional<Tensor> bias, double dropout_p, double eps, std::optional<Tensor> rng, bool rms,
    bool return_sum) {
  const char* op = norm_function(x_bias, residual, dropout_p, rms);
  NormCpuParams p{};
  Vectors vectors;
  const int64_t rows = set_common(p, vectors, x, x_bias, residual, weight, dropout_p, rng, op);
  if (bias) check_norm_bias(*bias, weight, x, op);
  vectors.bias = padded_vector(bias, p.hidden);
  p.bias = vectors.bias.data();
  p.eps = static_cast<float>(eps);
  Tensor y = allocate_like(x);
  Tensor sum = return_sum ? allocate_like(x) : allocate(x, {0});
  const auto [mean, rstd] = new_statistics(p, x, rows, rms);
  p.y = y.mutable_data_ptr();
  p.sum = return_sum ? sum.mutable_data_ptr() : nullptr;
  p.plain = !return_sum && is_plain(x_bias, residual, dropout_p);
  const NormKernels& kernels = norm_kernels();
  RowChunks(rows).for_each([&](int64_t, int64_t begin, int64_t end) {
    kernels.forward(p, begin, end, thread_scratch(scratch_floats(p)));
  });
  return {y, sum, mean, rstd};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// `p` has everything but results; `own_dresidual`: that gradient is not dx.
Gradients run_backward(NormCpuParams& p, const Tensor& x, const std::optional<Tensor>& x_bias,
                       const Tensor& weight, int64_t rows, bool bias, bool own_dresidual) {
  Tensor dx = allocate_like(x);
  Tensor dresidual = own_dresidual ? allocate_like(x) : allocate(x, {0});
  p.dx = dx.mutable_data_ptr();
  p.x_bias_gradient = x_bias.has_value();
  p.dresidual = own_dresidual ? dresidual.mutable_data_ptr() : nullptr;

  const RowChunks chunks(rows);
  const int64_t stride = 3 * p.padded;
  Tensor partials = allocate(x, {chunks.count * stride}, ScalarType::Float);
  auto* sums = partials.mutable_data_ptr<float>();
  const NormKernels& kernels = norm_kernels();
  chunks.for_each([&](int64_t chunk, int64_t begin, int64_t end) {
    kernels.backward(p, begin, end, thread_scratch(scratch_floats(p)), sums + chunk * stride);
  });
  const auto gradient = [&](int64_t which, const Tensor& parameter) {
    return sum_chunks(sums + which * p.padded, chunks.count, stride, parameter);
  };
  const Tensor none = allocate(x, {0});
  return {dx, dresidual, x_bias ? gradient(2, *x_bias) : none, gradient(0, weight),
          bias ? gradient(1, weight) : none};
}

Gradients dropout_add_layer_norm_backward(Tensor dy, Tensor x, std::optional<Tensor> x_bias,
                                          std::optional<Tensor> residual, Tensor weight,
                                          std::optional<Tensor> mean, Tensor rstd, double dropout_p,
                                          std::optional<Tensor> rng, bool bias) {
  const char* op = "dropout_add_layer_norm_backward";
  NormCpuParams p{};
  Vectors vectors;
  const int64_t rows = set_common(p, vectors, x, x_bias, residual, weight, dropout_p, rng, op);
  check_like(dy, x, op, "dy", "x");
  set_statistics(p, mean, rstd, rows, x, op);
  p.dy = dy.const_data_ptr();
  p.plain = is_plain(x_bias, residual, dropout_p);
  return run_backward(p, x, x_bias, weight, rows, bias, residual && dropout_p > 0.0);
}

Gradients dropout_add_norm_sum_backward(Tensor dy, std::optional<Tensor> dsum, Tensor sum,
                                        std::optional<Tensor> x_bias, Tensor weight,
                                        std::optional<Tensor> mean, Tensor rstd, double dropout_p,
                                        std::optional<Tensor> rng, bool bias, bool residual) {
  const char* op = "dropout_add_norm_sum_backward";
  NormCpuParams p{};
  Vectors vectors;
  const int64_t rows = set_common(p, vectors, sum, {}, {}, weight, dropout_p, rng, op, "sum");
  check_norm_sum_arguments(dy, dsum, sum, x_bias, weight, op);
  set_statistics(p, mean, rstd, rows, sum, op);
  p.plain = true;
  p.dy = dy.const_data_ptr();
  p.dsum = dsum ? dsum->const_data_ptr() : nullptr;
  return run_backward(p, sum, x_bias, weight, rows, bias, residual && dropout_p > 0.0);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("dropout_add_layer_norm", TORCH_BOX(&dropout_add_layer_norm));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&dropout_add_layer_norm_backward));
  m.impl("dropout_add_norm_sum_backward", TORCH_BOX(&dropout_add_norm_sum_backward));
}

}  // namespace bert_unpad
