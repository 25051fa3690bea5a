// CUDA binding of gated linear units: checks, outputs, stream.
#include "gelu/glu_cuda.h"
#include "common/allocate.h"

#include <optional>
#include <tuple>

#include "cuda/binding.h"
#include "cuda/tickets.h"
#include "gelu/glu_arguments.h"

namespace bert_unpad::cuda {
namespace {

GluCudaParams common(const Tensor& x, const std::optional<Tensor>& bias, int64_t kind,
                     const char* op) {
  GluCudaParams p{};
  p.rows = set_glu(p, x, bias, kind, op);
  if (bias) {
    p.bias = bias->const_data_ptr();
    p.bias_dtype = storage_dtype(*bias, op, "bias");
  }
  return p;
}

Tensor forward(Tensor x, std::optional<Tensor> bias, int64_t kind) {
  const char* op = "glu";
  GluCudaParams p = common(x, bias, kind, op);
  const Call call(x, op);
  Tensor y = new_glu_result(x);
  p.y = y.mutable_data_ptr();
  glu(p, call.stream);
  return y;
}

std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor x, std::optional<Tensor> bias, int64_t kind) {
  const char* op = "glu_backward";
  GluCudaParams p = common(x, bias, kind, op);
  check_glu_gradient(dy, x, op);
  const Call call(x, op);
  Tensor dx = allocate_like(x);
  Tensor dbias = allocate(bias ? *bias : x, {bias ? 2 * p.width : 0});
  p.dy = dy.const_data_ptr();
  p.dx = dx.mutable_data_ptr();
  const ColumnScratch scratch = bias ? glu_scratch(p) : ColumnScratch{};
  Tensor partials = allocate(x, {scratch.rows, 2 * p.width}, ScalarType::Float);
  if (bias) {
    p.partials = partials.mutable_data_ptr<float>();
    p.tickets = tickets(op, call.stream, scratch.tickets);
    p.dbias = dbias.mutable_data_ptr();
  }
  glu_backward(p, call.stream);
  return {dx, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("glu", TORCH_BOX(&forward));
  m.impl("glu_backward", TORCH_BOX(&backward));
}

}  // namespace bert_unpad::cuda
