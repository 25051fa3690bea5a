// CUDA binding of 8-bit products: checks, outputs, workspace, stream.
#include "linear/fp8_cuda.h"
#include "common/allocate.h"

#include <optional>
#include <tuple>
#include <vector>

#include "cuda/binding.h"
#include "cuda/fp8_arguments.h"
#include "cuda/fp8_scaled.h"
#include "linear/workspace.h"

namespace bert_unpad::cuda {
namespace {

bool is_e5m2(const Tensor& t, const char* op, const char* name) {
  const ScalarType type = t.scalar_type();
  check(type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2, op, ": ", name,
        " must be float8_e4m3fn or float8_e5m2");
  return type == ScalarType::Float8_e5m2;
}

std::tuple<Tensor, Tensor, Tensor> quantize(Tensor x, bool e5m2, bool transpose) {
  const char* op = "quantize_fp8";
  QuantizeParams p{};
  set_fp8_operand(p, x, op);
  p.e5m2 = e5m2;
  const Call call(x, op);
  auto [q, q_transposed] = allocate_fp8_results(p, x, e5m2, transpose);
  Tensor scale = allocate(x, {}, ScalarType::Float);
  Tensor partials = allocate(x, {quantize_partials(p)}, ScalarType::Float);
  p.scale = scale.mutable_data_ptr<float>();
  p.partials = partials.mutable_data_ptr<float>();
  if (p.columns == 0 || p.rows == 0) {
    torch::stable::fill_(scale, 1.0);
  } else {
    quantize_fp8(p, call.stream);
  }
  return {q, q_transposed, scale};
}

std::tuple<Tensor, Tensor, Tensor> quantize_scaled(Tensor x, bool e5m2, bool transpose,
                                                   Tensor scale, std::optional<Tensor> largest,
                                                   bool sum) {
  const char* op = "quantize_fp8_scaled";
  ScaledParams p{};
  set_fp8_operand(p, x, op);
  p.e5m2 = e5m2;
  p.scale = check_scale(scale, x, op);
  p.largest = check_largest(largest, x, op);
  const Call call(x, op);
  auto [q, q_transposed] = allocate_fp8_results(p, x, e5m2, transpose);
  Tensor sums = allocate(x, {sum ? p.columns : 0}, ScalarType::Float);
  Tensor partials = allocate(x, {sum ? fp8_tile_rows(p) : 0, p.columns}, ScalarType::Float);
  p.sums = sum ? sums.mutable_data_ptr<float>() : nullptr;
  p.partials = partials.mutable_data_ptr<float>();
  quantize_fp8_scaled(op, p, call.stream);
  return {q, q_transposed, sums};
}

// The memory of a matrix in a list, which must have this shape and dtype.
uint8_t* matrix(const Tensor& t, int64_t rows, int64_t columns, ScalarType type, const Tensor& like,
                const char* op, const char* name) {
  check_shape(t, {rows, columns}, op, name, "that of its weight");
  check_dtype(t, type, op, name, type == ScalarType::Float ? "float32" : "float8_e4m3fn");
  check_contiguous(t, op, name);
  check_same_device(t, like, op, name);
  check_aligned(t, op, name);
  return static_cast<uint8_t*>(t.mutable_data_ptr());
}

void quantize_list(std::vector<Tensor> weights, std::vector<Tensor> q,
                   std::vector<Tensor> q_transposed, std::vector<Tensor> scales) {
  const char* op = "quantize_weights_fp8_";
  check(q.size() == weights.size() && q_transposed.size() == weights.size() &&
            scales.size() == weights.size(),
        op, ": expected lists of equal length");
  if (weights.empty()) return;
  const Tensor& like = weights[0];
  std::vector<Fp8Matrix> list;
  for (size_t i = 0; i < weights.size(); ++i) {
    check_shape(weights[i], {-1, -1}, op, "weights", "[rows, columns]");
    const int64_t rows = weights[i].size(0), columns = weights[i].size(1);
    check(rows % kFp8Multiple == 0 && columns % kFp8Multiple == 0, op,
          ": weights must have multiples of 16 rows and columns, got ", ShapeOf(weights[i]));
    check_scalar(scales[i], ScalarType::Float, like, op, "scales", "float32");
    constexpr ScalarType kType = ScalarType::Float8_e4m3fn;
    Fp8Matrix m{};
    m.rows = rows;
    m.columns = columns;
    m.x = matrix(weights[i], rows, columns, ScalarType::Float, like, op, "weights");
    m.q = matrix(q[i], rows, columns, kType, like, op, "q");
    m.q_transposed = matrix(q_transposed[i], columns, rows, kType, like, op, "q_transposed");
    m.scale = scales[i].mutable_data_ptr<float>();
    list.push_back(m);
  }
  const Call call(like, op);
  Tensor partials = allocate(like, {weight_partials(list)}, ScalarType::Float);
  quantize_weights(list, partials.mutable_data_ptr<float>(), call.stream);
}

void check_operand(const Tensor& t, const Tensor& scale, const Tensor& like, const char* op,
                   const char* name, const char* scale_name) {
  check_shape(t, {-1, -1}, op, name, "[rows, k]");
  check_contiguous(t, op, name);
  check_same_device(t, like, op, name);
  check_aligned(t, op, name);
  check_scalar(scale, ScalarType::Float, like, op, scale_name, "float32");
  check_aligned(scale, op, scale_name);
}

// Shared by both forms; `result` gives the tensor for these sizes, which errors call `name`.
template <class Result>
Tensor multiply(const char* op, const Tensor& a, const Tensor& b, const Tensor& a_scale,
                const Tensor& b_scale, const std::optional<Tensor>& bias, bool sum_over_tokens,
                bool accumulate, const char* name, const Result& result) {
  check_operand(a, a_scale, a, op, "a", "a_scale");
  check_operand(b, b_scale, a, op, "b", "b_scale");
  check(a.size(1) == b.size(1) && a.size(1) % kFp8Multiple == 0, op,
        ": a and b must have the same number of columns, a multiple of 16, got ", ShapeOf(a),
        " and ", ShapeOf(b));
  check(a.size(0) % kFp8Multiple == 0, op, ": a must have a multiple of 16 rows, got ", ShapeOf(a));
  Tensor out = result(b.size(0), a.size(0));
  Fp8Product p{};
  p.a_e5m2 = is_e5m2(a, op, "a");
  p.b_e5m2 = is_e5m2(b, op, "b");
  check(!(p.a_e5m2 && p.b_e5m2), op, ": one of a and b must be float8_e4m3fn");
  p.a_rows = a.size(0);
  p.b_rows = b.size(0);
  p.k = a.size(1);
  p.tokens = sum_over_tokens ? TokenDim::kK : TokenDim::kN;
  p.a = a.const_data_ptr();
  p.b = b.const_data_ptr();
  p.a_scale = a_scale.const_data_ptr<float>();
  p.b_scale = b_scale.const_data_ptr<float>();
  p.out = out.mutable_data_ptr();
  p.out_dtype = storage_dtype(out, op, name);
  p.accumulate = accumulate;
  // Forward passes bear shorter sums; gradients are summed in full (Micikevicius et al., 2022).
  p.fast_accumulation = !p.a_e5m2 && !p.b_e5m2;
  if (bias) {
    check_vector(*bias, p.a_rows, out, op, "bias");
    check(storage_dtype(*bias, op, "bias") == fp8_bias_dtype(p.out_dtype), op,
          ": bias must have the result's dtype, and be bfloat16 where that is float32");
    p.bias = bias->const_data_ptr();
  }
  if (out.numel() == 0) return out;
  if (p.k == 0) {
    if (!accumulate) torch::stable::zero_(out);
    return out;
  }
  const Call call(a, op);
  matmul(fp8_matmul(p), Workspace(a), call.stream, op);
  return out;
}

Tensor product(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, std::optional<Tensor> bias,
               ScalarType dtype, bool sum_over_tokens) {
  return multiply(
      "fp8_product", a, b, a_scale, b_scale, bias, sum_over_tokens, false, "dtype",
      [&](int64_t rows, int64_t columns) { return allocate(a, {rows, columns}, dtype); });
}

void product_in_place(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor out,
                      bool accumulate) {
  const char* op = "fp8_product_";
  multiply(op, a, b, a_scale, b_scale, std::nullopt, true, accumulate, "out",
           [&](int64_t rows, int64_t columns) {
             check_shape(out, {rows, columns}, op, "out", "[b's rows, a's rows]");
             check_contiguous(out, op, "out");
             check_same_device(out, a, op, "out");
             return out;
           });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("quantize_fp8", TORCH_BOX(&quantize));
  m.impl("quantize_fp8_scaled", TORCH_BOX(&quantize_scaled));
  m.impl("quantize_weights_fp8_", TORCH_BOX(&quantize_list));
  m.impl("fp8_product", TORCH_BOX(&product));
  m.impl("fp8_product_", TORCH_BOX(&product_in_place));
}

}  // namespace bert_unpad::cuda
