// CPU bindings of gated linear units: checks, row chunks, dispatch.
#include "common/allocate.h"
#include "gelu/glu.h"

#include <tuple>

#include "cpu/rows.h"
#include "gelu/glu_arguments.h"

namespace bert_unpad {

namespace {

Tensor glu(Tensor x, std::optional<Tensor> bias, int64_t kind) {
  GluCpuParams p{};
  const int64_t rows = set_glu(p, x, bias, kind, "glu");
  const std::vector<float> bias_vector = padded_vector(bias, 2 * p.width);
  Tensor y = new_glu_result(x);
  p.bias = bias_vector.data();
  p.out = y.mutable_data_ptr();
  const GluKernels& kernels = glu_kernels();
  RowChunks(rows).for_each(
      [&](int64_t, int64_t begin, int64_t end) { kernels.forward(p, begin, end); });
  return y;
}

std::tuple<Tensor, Tensor> glu_backward(Tensor dy, Tensor x, std::optional<Tensor> bias,
                                        int64_t kind) {
  const char* op = "glu_backward";
  GluCpuParams p{};
  const int64_t rows = set_glu(p, x, bias, kind, op);
  check_glu_gradient(dy, x, op);
  const std::vector<float> bias_vector = padded_vector(bias, 2 * p.width);
  Tensor dx = allocate_like(x);
  p.bias = bias_vector.data();
  p.dy = dy.const_data_ptr();
  p.out = dx.mutable_data_ptr();
  const GluKernels& kernels = glu_kernels();
  Tensor dbias = bias_gradient(
      RowChunks(rows), bias, 2 * p.width, x,
      [&](int64_t begin, int64_t end, float* sums) { kernels.backward(p, begin, end, sums); });
  return {dx, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("glu", TORCH_BOX(&glu));
  m.impl("glu_backward", TORCH_BOX(&glu_backward));
}

}  // namespace bert_unpad
