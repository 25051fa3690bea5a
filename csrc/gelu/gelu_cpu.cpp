// CPU bindings of bias + GELU: checks, row chunks, dispatch.
#include "gelu/gelu.h"

#include <tuple>

#include "common/allocate.h"
#include "common/checks.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bert_unpad {

namespace {

// Checks what forward and backward have in common; returns the number of rows.
int64_t set_common(GeluCpuParams& p, std::vector<float>& bias_vector, const Tensor& x,
                   const std::optional<Tensor>& bias, bool tanh, const char* op) {
  p.dtype = storage_dtype(x, op, "x");
  p.tanh = tanh;
  check(x.dim() >= 1, op, ": x must have shape [..., hidden], got ", ShapeOf(x));
  check_contiguous(x, op, "x");
  p.hidden = x.size(x.dim() - 1);
  if (bias) check_parameter(*bias, p.hidden, x, op, "bias");
  bias_vector = padded_vector(bias, p.hidden);
  p.x = x.const_data_ptr();
  p.bias = bias_vector.data();
  return p.hidden == 0 ? 0 : x.numel() / p.hidden;
}

Tensor bias_gelu(Tensor x, std::optional<Tensor> bias, bool tanh) {
  GeluCpuParams p{};
  std::vector<float> bias_vector;
  const int64_t rows = set_common(p, bias_vector, x, bias, tanh, "bias_gelu");
  Tensor y = allocate_like(x);
  p.out = y.mutable_data_ptr();
  const GeluKernels& kernels = gelu_kernels();
  RowChunks(rows).for_each(
      [&](int64_t, int64_t begin, int64_t end) { kernels.forward(p, begin, end); });
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(Tensor dy, Tensor x, std::optional<Tensor> bias,
                                              bool tanh) {
  const char* op = "bias_gelu_backward";
  GeluCpuParams p{};
  std::vector<float> bias_vector;
  const int64_t rows = set_common(p, bias_vector, x, bias, tanh, op);
  check_like(dy, x, op, "dy", "x");
  Tensor dx = allocate_like(x);
  p.dy = dy.const_data_ptr();
  p.out = dx.mutable_data_ptr();
  const GeluKernels& kernels = gelu_kernels();
  Tensor dbias = bias_gradient(
      RowChunks(rows), bias, padded_columns(p.hidden), x,
      [&](int64_t begin, int64_t end, float* sums) { kernels.backward(p, begin, end, sums); });
  return {dx, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}

}  // namespace bert_unpad
