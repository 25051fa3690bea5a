// CUDA binding of the linear layer's products: checks, outputs, workspace, stream.
#include "linear/linear_cuda.h"
#include "common/allocate.h"

#include <optional>
#include <tuple>
#include <vector>

#include "cuda/binding.h"
#include "linear/workspace.h"

namespace bert_unpad::cuda {
namespace {

void check_matrix(const Tensor& t, const char* op, const char* name, const char* shape) {
  check_shape(t, {-1, -1}, op, name, shape);
  check_contiguous(t, op, name);
  const DType dtype = storage_dtype(t, op, name);
  check(dtype != DType::kFloat32, op, ": ", name, " must be bfloat16 or float16 on a GPU");
  check(t.size(1) % 8 == 0, op, ": ", name, " must have a multiple of 8 columns, got ", ShapeOf(t));
}

void check_second(const Tensor& t, const Tensor& first, const char* op, const char* name,
                  const char* shape) {
  check_matrix(t, op, name, shape);
  check(t.scalar_type() == first.scalar_type(), op, ": ", name,
        " must have the dtype of the first argument");
  check_same_device(t, first, op, name);
}

void run(const Matmul& product, const Tensor& like, const char* op) {
  const Call call(like, op);
  matmul(product, Workspace(like), call.stream, op);
}

std::tuple<Tensor, Tensor> forward(Tensor x, Tensor weight, std::optional<Tensor> bias, bool gelu) {
  const char* op = "linear";
  check_matrix(x, op, "x", "[tokens, in_features]");
  check_second(weight, x, op, "weight", "[out_features, in_features]");
  check(weight.size(1) == x.size(1), op, ": weight must have ", x.size(1), " columns like x, got ",
        ShapeOf(weight));
  const LinearShape shape{storage_dtype(x, op, "x"), x.size(0), x.size(1), weight.size(0)};
  check(shape.out_features % 8 == 0, op, ": weight must have a multiple of 8 rows, got ",
        ShapeOf(weight));
  if (bias) {
    check_parameter(*bias, shape.out_features, x, op, "bias");
    check(bias->scalar_type() == x.scalar_type(), op, ": bias must have x's dtype");
  }
  check(!gelu || bias.has_value(), op, ": gelu needs a bias");
  Tensor y = allocate(x, {shape.tokens, shape.out_features});
  Tensor pre =
      allocate(x, gelu ? std::vector<int64_t>{y.size(0), y.size(1)} : std::vector<int64_t>{0});
  if (y.numel() != 0) {
    run(linear_forward(shape, x.const_data_ptr(), weight.const_data_ptr(),
                       bias ? bias->const_data_ptr() : nullptr, y.mutable_data_ptr(),
                       gelu ? pre.mutable_data_ptr() : nullptr),
        x, op);
  }
  return {y, pre};
}

Tensor dgrad(Tensor dy, Tensor weight, std::optional<Tensor> addend, std::optional<Tensor> pre) {
  const char* op = "linear_dgrad";
  check_matrix(dy, op, "dy", "[tokens, out_features]");
  check_second(weight, dy, op, "weight", "[out_features, in_features]");
  check(weight.size(0) == dy.size(1), op, ": weight must have ", dy.size(1),
        " rows, dy's columns, got ", ShapeOf(weight));
  check(!(addend && pre), op, ": addend and pre exclude each other");
  const LinearShape shape{storage_dtype(dy, op, "dy"), dy.size(0), weight.size(1), dy.size(1)};
  Tensor dx = allocate(dy, {shape.tokens, shape.in_features});
  if (addend) check_like(*addend, dx, op, "addend", "the result");
  if (pre) check_like(*pre, dx, op, "pre", "the result");
  if (dx.numel() != 0) {
    run(linear_dgrad(shape, dy.const_data_ptr(), weight.const_data_ptr(),
                     addend ? addend->const_data_ptr() : nullptr,
                     pre ? pre->const_data_ptr() : nullptr, dx.mutable_data_ptr()),
        dy, op);
  }
  return dx;
}

// Shared by both forms; `accumulate` adds to dweight.
Tensor wgrad(const Tensor& dy, const Tensor& x, Tensor& dweight, bool bias, bool accumulate,
             const char* op) {
  const LinearShape shape{storage_dtype(dy, op, "dy"), dy.size(0), x.size(1), dy.size(1)};
  Tensor dbias = allocate(dweight, {bias ? shape.out_features : 0});
  if (shape.tokens == 0) {
    if (!accumulate) torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
  } else if (dweight.numel() != 0) {
    run(linear_wgrad(shape, dy.const_data_ptr(), x.const_data_ptr(), accumulate,
                     dweight.mutable_data_ptr(), storage_dtype(dweight, op, "dweight"),
                     bias ? dbias.mutable_data_ptr() : nullptr),
        dy, op);
  }
  return dbias;
}

void check_wgrad(const Tensor& dy, const Tensor& x, const char* op) {
  check_matrix(dy, op, "dy", "[tokens, out_features]");
  check_second(x, dy, op, "x", "[tokens, in_features]");
  check(x.size(0) == dy.size(0), op, ": x must have ", dy.size(0), " rows like dy, got ",
        ShapeOf(x));
}

std::tuple<Tensor, Tensor> new_wgrad(Tensor dy, Tensor x, bool bias, ScalarType dtype) {
  const char* op = "linear_wgrad";
  check_wgrad(dy, x, op);
  check(dtype == ScalarType::Float || dtype == dy.scalar_type(), op,
        ": dtype must be float32 or dy's");
  Tensor dweight = allocate(dy, {dy.size(1), x.size(1)}, dtype);
  Tensor dbias = wgrad(dy, x, dweight, bias, false, op);
  return {dweight, dbias};
}

Tensor wgrad_in_place(Tensor dy, Tensor x, Tensor dweight, bool accumulate, bool bias) {
  const char* op = "linear_wgrad_";
  check_wgrad(dy, x, op);
  check_shape(dweight, {dy.size(1), x.size(1)}, op, "dweight", "[out_features, in_features]");
  check(dweight.scalar_type() == ScalarType::Float || dweight.scalar_type() == dy.scalar_type(), op,
        ": dweight must be float32 or of dy's dtype");
  check_contiguous(dweight, op, "dweight");
  check_same_device(dweight, dy, op, "dweight");
  return wgrad(dy, x, dweight, bias, accumulate, op);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("linear", TORCH_BOX(&forward));
  m.impl("linear_dgrad", TORCH_BOX(&dgrad));
  m.impl("linear_wgrad", TORCH_BOX(&new_wgrad));
  m.impl("linear_wgrad_", TORCH_BOX(&wgrad_in_place));
}

}  // namespace bert_unpad::cuda
