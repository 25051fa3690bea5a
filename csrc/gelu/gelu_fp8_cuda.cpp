// CUDA binding of gelu(x + bias) in 8 bits: checks, outputs, stream.
#include "gelu/gelu_fp8_cuda.h"
#include "common/allocate.h"

#include <optional>
#include <tuple>

#include "cuda/binding.h"
#include "cuda/fp8_arguments.h"

namespace bert_unpad::cuda {
namespace {

GeluFp8Params common(const Tensor& x, const std::optional<Tensor>& bias, bool tanh,
                     const Tensor& scale, const std::optional<Tensor>& largest, const char* op) {
  GeluFp8Params p{};
  set_fp8_operand(p, x, op);
  p.tanh = tanh;
  if (bias) {
    check_parameter(*bias, p.columns, x, op, "bias");
    p.bias = bias->const_data_ptr();
    p.bias_dtype = storage_dtype(*bias, op, "bias");
  }
  p.scale = check_scale(scale, x, op);
  p.largest = check_largest(largest, x, op);
  return p;
}

std::tuple<Tensor, Tensor> forward(Tensor x, std::optional<Tensor> bias, bool tanh, Tensor scale,
                                   std::optional<Tensor> largest, bool transpose) {
  const char* op = "bias_gelu_fp8";
  GeluFp8Params p = common(x, bias, tanh, scale, largest, op);
  const Call call(x, op);
  auto [q, q_transposed] = allocate_fp8_results(p, x, false, transpose);
  bias_gelu_fp8(p, call.stream);
  return {q, q_transposed};
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor dy, Tensor x, std::optional<Tensor> bias,
                                            bool tanh, Tensor scale, std::optional<Tensor> largest,
                                            bool transpose) {
  const char* op = "bias_gelu_fp8_backward";
  GeluFp8Params p = common(x, bias, tanh, scale, largest, op);
  check_like(dy, x, op, "dy", "x");
  check_aligned(dy, op, "dy");
  const Call call(x, op);
  auto [q, q_transposed] = allocate_fp8_results(p, x, true, transpose);
  Tensor dbias = allocate(bias ? *bias : x, {bias ? p.columns : 0});
  Tensor partials = allocate(x, {bias ? fp8_tile_rows(p) : 0, p.columns}, ScalarType::Float);
  p.dy = dy.const_data_ptr();
  p.dbias = bias ? dbias.mutable_data_ptr() : nullptr;
  p.partials = partials.mutable_data_ptr<float>();
  bias_gelu_fp8_backward(p, call.stream);
  return {q, q_transposed, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("bias_gelu_fp8", TORCH_BOX(&forward));
  m.impl("bias_gelu_fp8_backward", TORCH_BOX(&backward));
}

}  // namespace bert_unpad::cuda
