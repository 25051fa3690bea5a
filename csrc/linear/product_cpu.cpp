// CPU binding of the product of a linear layer in fp32: checks, memory, tasks.
#include "linear/product.h"

#include <algorithm>

#include "common/checks.h"
#include "cpu/parallel.h"

namespace bert_unpad {

namespace {

constexpr int64_t kPacked = 1 << 18;  // floats of weights that are packed at a time

void compute(ProductCpuParams p) {
  const ProductKernels& kernels = product_kernels();
  const int64_t threads = torch::stable::get_num_threads(), panel = kernels.panel;
  if (p.rows <= kernels.few_rows && !p.transposed) {
    constexpr int64_t kColumns = 32;
    return parallel_for(0, p.columns / kColumns, 4, [&](int64_t begin, int64_t end) {
      kernels.narrow(p, begin * kColumns, (end - begin) * kColumns);
    });
  }
  const int64_t slab = std::max(kPacked / p.depth / panel, int64_t{1}) * panel;
  p.panels = thread_scratch(std::min(slab, (p.columns + panel - 1) / panel * panel) * p.depth);
  for (p.first = 0; p.first < p.columns; p.first += slab) {
    const int64_t columns = std::min(slab, p.columns - p.first);
    const int64_t panels = (columns + panel - 1) / panel;
    parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) kernels.pack(p, p.first + i * panel);
    });
    // Blocks of all rows would be fewest; each thread gets some.
    int64_t rows = kernels.rows;
    while (rows > 24 && (p.rows + rows - 1) / rows * panels < 4 * threads) rows /= 2;
    const int64_t down = (p.rows + rows - 1) / rows;
    parallel_tasks(down * panels, [&](int64_t i) {
      const int64_t row = i / panels * rows, column = p.first + i % panels * panel;
      kernels.block(p, row, std::min(rows, p.rows - row), column,
                    std::min(panel, p.columns - column));
    });
  }
}

void packed_product_(Tensor y, Tensor x, Tensor weight, std::optional<Tensor> bias,
                     std::optional<Tensor> addend) {
  const char* op = "packed_product_";
  check_shape(x, {-1, -1}, op, "x", "[rows, in_features]");
  check_shape(weight, {-1, x.size(1)}, op, "weight", "[out_features, in_features]");
  check_dtype(x, ScalarType::Float, op, "x", "float32");
  check_dtype(weight, ScalarType::Float, op, "weight", "float32");
  check_shape(y, {x.size(0), weight.size(0)}, op, "y", "[rows, out_features]");
  check_dtype(y, ScalarType::Float, op, "y", "float32");
  check_same_device(weight, x, op, "weight");
  check_same_device(y, x, op, "y");
  ProductCpuParams p{};
  p.rows = x.size(0);
  p.depth = x.size(1);
  p.columns = weight.size(0);
  check(p.depth % 32 == 0 && p.columns % 32 == 0, op,
        ": in_features and out_features must be multiples of 32, got ", p.depth, " and ",
        p.columns);
  check(x.stride(1) == 1, op, ": x must have contiguous rows");
  check(y.stride(1) == 1, op, ": y must have contiguous rows");
  p.transposed = weight.stride(1) != 1;
  check(!p.transposed || weight.stride(0) == 1, op,
        ": weight must have contiguous rows or contiguous columns");
  p.x_stride = x.stride(0);
  p.y_stride = y.stride(0);
  p.weight_stride = weight.stride(p.transposed ? 1 : 0);
  check_storage(y, op, "y");
  check_storage(x, op, "x");
  check_storage(weight, op, "weight");
  if (bias) {
    check_parameter(*bias, p.columns, x, op, "bias");
    check_dtype(*bias, ScalarType::Float, op, "bias", "float32");
    p.bias = bias->const_data_ptr<float>();
  }
  if (addend) {
    check_shape(*addend, {p.rows, p.columns}, op, "addend", "[rows, out_features]");
    check_dtype(*addend, ScalarType::Float, op, "addend", "float32");
    check_contiguous(*addend, op, "addend");
    check_same_device(*addend, x, op, "addend");
    const auto *from = addend->const_data_ptr<float>(), *to = y.const_data_ptr<float>();
    const int64_t extent = p.rows > 0 ? (p.rows - 1) * p.y_stride + p.columns : 0;
    check(from + addend->numel() <= to || to + extent <= from, op,
          ": y must not lie in the memory of addend");
    p.addend = addend->const_data_ptr<float>();
  }
  p.x = x.const_data_ptr<float>();
  p.weight = weight.const_data_ptr<float>();
  p.y = y.mutable_data_ptr<float>();
  if (p.rows > 0) compute(p);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("packed_product_", TORCH_BOX(&packed_product_));
}

}  // namespace bert_unpad
