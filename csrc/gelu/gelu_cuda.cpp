// CUDA binding of gelu(x + bias): checks, outputs, stream.
#include "gelu/gelu_cuda.h"
#include "common/allocate.h"

#include <optional>
#include <tuple>

#include "cuda/binding.h"
#include "cuda/tickets.h"

namespace bert_unpad::cuda {
namespace {

GeluCudaParams common(const Tensor& x, const std::optional<Tensor>& bias, bool tanh,
                      const char* op) {
  check(x.dim() >= 1, op, ": x must have shape [..., hidden], got ", ShapeOf(x));
  check_contiguous(x, op, "x");
  GeluCudaParams p{};
  p.dtype = storage_dtype(x, op, "x");
  p.columns = x.size(x.dim() - 1);
  p.rows = p.columns == 0 ? 0 : x.numel() / p.columns;
  p.x = x.const_data_ptr();
  p.tanh = tanh;
  if (bias) {
    check_parameter(*bias, p.columns, x, op, "bias");
    p.bias = bias->const_data_ptr();
    p.bias_dtype = storage_dtype(*bias, op, "bias");
  }
  return p;
}

Tensor forward(Tensor x, std::optional<Tensor> bias, bool tanh) {
  const char* op = "bias_gelu";
  GeluCudaParams p = common(x, bias, tanh, op);
  const Call call(x, op);
  Tensor y = allocate_like(x);
  p.y = y.mutable_data_ptr();
  bias_gelu(p, call.stream);
  return y;
}

std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor x, std::optional<Tensor> bias, bool tanh) {
  const char* op = "bias_gelu_backward";
  GeluCudaParams p = common(x, bias, tanh, op);
  check_like(dy, x, op, "dy", "x");
  const Call call(x, op);
  Tensor dx = allocate_like(x);
  Tensor dbias = allocate(bias ? *bias : x, {bias ? p.columns : 0});
  p.dy = dy.const_data_ptr();
  p.dx = dx.mutable_data_ptr();
  // Allocated even where it stays unused; it must outlive the launch only in stream order, which
  // PyTorch's allocator keeps.
  const ColumnScratch scratch = bias ? bias_gelu_scratch(p) : ColumnScratch{};
  Tensor partials = allocate(x, {scratch.rows, p.columns}, ScalarType::Float);
  if (bias) {
    p.partials = partials.mutable_data_ptr<float>();
    p.tickets = tickets(op, call.stream, scratch.tickets);
    p.dbias = dbias.mutable_data_ptr();
  }
  bias_gelu_backward(p, call.stream);
  return {dx, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("bias_gelu", TORCH_BOX(&forward));
  m.impl("bias_gelu_backward", TORCH_BOX(&backward));
}

}  // namespace bert_unpad::cuda
