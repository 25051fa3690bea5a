// Linear layers of an encoder on a CPU; see products.h.
#include "common/allocate.h"
#include "encoder/products.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "cpu/isa.h"
#include "linear/product.h"

namespace bert_unpad {

namespace {

constexpr int64_t kSlab = 1 << 18;  // floats of weights that are packed at a time

// The parts of a packed weight in 8 bits, one after the other.
struct Int8Layout {
  int64_t depth, columns;  // columns to whole panels
  Int8Layout(int64_t depth, int64_t columns)
      : depth(depth), columns(multiple_of(kInt8Panel, columns)) {}
  int64_t scales() const { return columns * depth; }
  int64_t sums() const { return scales() + 4 * columns; }
  int64_t bytes() const { return sums() + 4 * columns; }
};

ProductCpuParams product_params(const Linear& linear, const Input& in, const Output& out) {
  ProductCpuParams p{};
  p.x = in.x;
  p.x_stride = in.stride;
  p.rows = in.rows;
  p.depth = linear.depth;
  p.columns = linear.columns;
  p.weight = linear.weight;
  p.weight_stride = linear.depth;
  p.bias = linear.bias;
  p.addend = out.addend;
  p.y = out.y;
  p.y_stride = out.stride;
  p.panels = const_cast<float*>(linear.panels);  // written by `pack` alone
  p.first = linear.first;
  return p;
}

// [panels, in_features, columns of a panel]: what a product of fp32 reads.
std::array<int64_t, 3> panel_shape(const Linear& linear) {
  const int64_t panel = product_kernels().panel;
  return {(linear.columns + panel - 1) / panel, linear.depth, panel};
}

// A run of columns in one panel, of a run of rows.
struct Block {
  int64_t row, rows, column, columns;
};

void compute(const Linear& linear, const Input& in, const Output& out, const Block& b) {
  if (linear.bf16_panels) {
    float* sums = thread_scratch<3>(multiple_of(16, b.rows) * b.columns);
    const Bf16ProductParams p{linear.depth, in.bf16_rows, linear.bf16_panels,
                              linear.bias,  out.addend,   linear.columns,
                              out.y,        out.stride,   sums};
    bf16_product_kernels()->product(p, b.row, b.rows, b.column, b.columns);
  } else if (!linear.weight) {
    static const bool dot_products = int8_dot_products();
    const Int8ProductParams p{dot_products, linear.depth,   in.int8, linear.int8, linear.bias,
                              out.addend,   linear.columns, out.y,   out.stride};
    const auto* bf16_kernels = bf16_product_kernels();
    const bool by_tiles = bf16_kernels && bf16_kernels->int8_product && linear.depth % 64 == 0;
    (by_tiles ? bf16_kernels->int8_product : encoder_kernels().product)(p, b.row, b.rows, b.column,
                                                                        b.columns);
  } else if (linear.panels) {
    product_kernels().block(product_params(linear, in, out), b.row, b.rows, b.column, b.columns);
  } else {  // all rows
    product_kernels().narrow(product_params(linear, in, out), b.column, b.columns);
  }
}

// Columns [first, first + columns) of the product, from panels of `panel` columns.
void multiply_columns(bool on_all, const Linear& linear, const Input& in, const Output& out,
                      const Activation* activation, int64_t first, int64_t columns, int64_t panel) {
  const Linear* gate = activation ? activation->gate : nullptr;
  const bool all_rows = linear.weight && !linear.panels;
  const int64_t panels = (columns + panel - 1) / panel;
  // Blocks of all rows would be fewest; each thread gets some, and as many as the others.
  const int64_t threads = on_all ? torch::stable::get_num_threads() : 1;
  int64_t height = std::max<int64_t>(in.rows, 1);
  const auto down = [&] { return (in.rows + height - 1) / height; };
  const auto uneven = [&] {
    const int64_t blocks = down() * panels;
    return blocks < 4 * threads && blocks % threads != 0;
  };
  while (!all_rows && on_all && height > 24 && uneven()) height = multiple_of(6, height / 2);
  for_tasks(on_all, panels * down(), [&](int64_t task) {
    Block block{task % down() * height, 0, first + task / down() * panel, 0};
    block.rows = std::min(height, in.rows - block.row);
    block.columns = std::min(panel, first + columns - block.column);
    // The block of the gate, and one that is rounded, lie at the beginning of scratch memory.
    const int64_t numbers = block.rows * panel;
    float* scratch = gate || out.rounded ? thread_scratch(2 * numbers) : nullptr;
    const auto there = [&](float* p) { return p - block.row * panel - block.column; };
    if (gate) compute(*gate, in, {there(scratch), panel}, block);
    Output to = out;
    if (out.rounded) to = {there(scratch + numbers), panel, out.addend};
    compute(linear, in, to, block);
    float* y = to.y + block.row * to.stride + block.column;
    if (activation)
      encoder_kernels().activate(activation->kind, activation->rough, y, to.stride,
                                 gate ? scratch : nullptr, panel, block.rows, block.columns);
    if (out.rounded)
      bf16_product_kernels()->round(y, to.stride, block.rows, block.columns,
                                    out.rounded + block.row * linear.columns + block.column,
                                    linear.columns);
  });
}

Tensor pack_float32(const Tensor& weight) {
  Linear linear{};
  linear.depth = weight.size(1);
  linear.columns = weight.size(0);
  linear.weight = weight.const_data_ptr<float>();
  Tensor out = allocate(weight, panel_shape(linear));
  pack(true, linear, 0, linear.columns, out.mutable_data_ptr<float>());
  // Columns that there are not are never read.
  return out;
}

// [panels, pairs of in_features, 16 columns of two numbers], as cpu/gemm_bf16.h reads it.
Tensor pack_bf16(const Tensor& weight, const char* op) {
  check(bf16_product_kernels(), op, ": dtype bfloat16: this CPU multiplies no bf16");
  const int64_t columns = weight.size(0), depth = weight.size(1);
  const Tensor rounded = torch::stable::to(weight, ScalarType::BFloat16);
  Tensor out = allocate(weight, {columns / 16, depth / 2, 32}, ScalarType::BFloat16);
  const auto* from = static_cast<const uint16_t*>(rounded.const_data_ptr());
  auto* to = static_cast<uint16_t*>(out.mutable_data_ptr());
  parallel_for(0, columns, 16, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      uint16_t* panel = to + c / 16 * 16 * depth + c % 16 * 2;
      for (int64_t k = 0; k < depth; ++k) panel[k / 2 * 32 + k % 2] = from[c * depth + k];
    }
  });
  return out;
}

// Rounds to 8 bits, by column of the output.
Tensor pack_int8(const Tensor& weight, const char* op) {
  const int64_t columns = weight.size(0), depth = weight.size(1);
  const Int8Layout layout(depth, columns);
  Tensor out = allocate(weight, {layout.bytes()}, ScalarType::Byte);
  auto* base = out.mutable_data_ptr<uint8_t>();
  auto* panels = reinterpret_cast<int8_t*>(base);
  auto* scales = reinterpret_cast<float*>(base + layout.scales());
  auto* sums = reinterpret_cast<int32_t*>(base + layout.sums());
  const auto* values = weight.const_data_ptr<float>();
  parallel_for(0, layout.columns, kInt8Panel, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const float* row = values + c * depth;
      int8_t* panel = panels + c / kInt8Panel * kInt8Panel * depth + c % kInt8Panel * 4;
      float largest = 0.0f;
      for (int64_t k = 0; c < columns && k < depth; ++k) {
        check(std::isfinite(row[k]), op, ": weight must be finite, but row ", c, " is not");
        largest = std::max(largest, std::fabs(row[k]));
      }
      scales[c] = largest / 127.0f;
      sums[c] = 0;
      for (int64_t k = 0; k < depth; ++k) {
        const auto whole =
            static_cast<int8_t>(largest > 0.0f ? std::lrint(127.0f * (row[k] / largest)) : 0);
        panel[k / 4 * kInt8Panel * 4 + k % 4] = whole;
        sums[c] += whole;
      }
    }
  });
  return out;
}

// Brings a weight [out_features, in_features] into the order of the product.
Tensor encoder_pack(Tensor weight, ScalarType dtype) {
  const char* op = "encoder_pack";
  check_shape(weight, {-1, -1}, op, "weight", "[out_features, in_features]");
  check_dtype(weight, ScalarType::Float, op, "weight", "float32");
  check_contiguous(weight, op, "weight");
  const int64_t columns = weight.size(0), depth = weight.size(1);
  check(columns % 32 == 0 && depth % 32 == 0, op,
        ": weight must have multiples of 32 features, got ", ShapeOf(weight));
  check(depth <= 65536, op, ": weight must have at most 65536 in_features, got ", depth);
  if (dtype == ScalarType::Float) return pack_float32(weight);
  if (dtype == ScalarType::BFloat16) return pack_bf16(weight, op);
  check(dtype == ScalarType::Char, op, ": dtype must be float32, bfloat16 or int8");
  return pack_int8(weight, op);
}

}  // namespace

Linear linear_of(const Tensor& weight, int64_t depth, int64_t columns, const char* op,
                 const char* name) {
  Linear out{};
  out.depth = depth;
  out.columns = columns;
  check(depth % 32 == 0 && columns % 32 == 0, op, ": ", name,
        " must have multiples of 32 features, got ", columns, " of ", depth);
  if (weight.scalar_type() == ScalarType::Byte) {
    const Int8Layout layout(depth, columns);
    check(weight.dim() == 1 && weight.size(0) == layout.bytes(), op, ": ", name,
          " must be what encoder_pack makes of [", columns, ", ", depth, "], [", layout.bytes(),
          "], got ", ShapeOf(weight));
    const auto* base = weight.const_data_ptr<uint8_t>();
    out.int8 = {reinterpret_cast<const int8_t*>(base),
                reinterpret_cast<const float*>(base + layout.scales()),
                reinterpret_cast<const int32_t*>(base + layout.sums())};
  } else if (weight.scalar_type() == ScalarType::BFloat16) {
    check(bf16_product_kernels(), op, ": ", name, ": this CPU multiplies no bf16");
    check_shape(weight, {columns / 16, depth / 2, 32}, op, name, "that encoder_pack gives it");
    out.bf16_panels = static_cast<const bf16*>(weight.const_data_ptr());
  } else {
    const bool packed = weight.dim() == 3;
    if (packed) {
      const auto [panels, in_features, panel] = panel_shape(out);
      check_shape(weight, {panels, in_features, panel}, op, name,
                  "that encoder_pack gives it on this CPU");
    } else {
      check_shape(weight, {columns, depth}, op, name, "[out_features, in_features]");
    }
    check_dtype(weight, ScalarType::Float, op, name, "float32, or packed");
    out.weight = weight.const_data_ptr<float>();
    if (packed) out.panels = out.weight;
  }
  check_contiguous(weight, op, name);
  return out;
}

bool needs_packing(int64_t rows) { return rows > product_kernels().few_rows; }

int64_t packed_floats(const Linear& linear) {
  return multiple_of(product_kernels().panel, linear.columns) * linear.depth;
}

void pack(bool on_all, Linear& linear, int64_t first, int64_t columns, float* panels) {
  linear.panels = panels;
  linear.first = first;
  const ProductKernels& kernels = product_kernels();
  const ProductCpuParams p = product_params(linear, {}, {});
  for_tasks(on_all, (columns + kernels.panel - 1) / kernels.panel,
            [&](int64_t i) { kernels.pack(p, first + i * kernels.panel); });
}

void round_rows(bool on_all, const Input& in, int64_t depth) {
  constexpr int64_t kRows = 8;
  if (!in.int8.data && !in.bf16_rows) return;
  const EncoderKernels& kernels = encoder_kernels();
  on_all = on_all && in.rows * depth >= kNumbersForAll;
  for_tasks(on_all, (in.rows + kRows - 1) / kRows, [&](int64_t i) {
    const int64_t row = i * kRows, rows = std::min(kRows, in.rows - row);
    const float* x = in.x + row * in.stride;
    if (in.int8.data)
      kernels.quantize(x, in.stride, rows, depth,
                       {in.int8.data + row * depth, in.int8.scales + row, in.int8.zeros + row});
    if (in.bf16_rows)
      bf16_product_kernels()->round(x, in.stride, rows, depth, in.bf16_rows + row * depth, depth);
  });
}

void widen_rows(bool on_all, const bf16* x, int64_t rows, int64_t depth, float* out) {
  constexpr int64_t kRows = 8;
  on_all = on_all && rows * depth >= kNumbersForAll;
  for_tasks(on_all, (rows + kRows - 1) / kRows, [&](int64_t i) {
    const int64_t at = i * kRows * depth;
    bf16_product_kernels()->widen(x + at, std::min(kRows * depth, rows * depth - at), out + at);
  });
}

void multiply(bool on_all, const Linear& linear, const Input& in, const Output& out,
              const Activation* activation) {
  constexpr int64_t kFewRowsPanel = 32, kBf16Panel = 96;
  on_all = on_all && in.rows * linear.depth * linear.columns >= kProductsForAll;
  const bool packs = linear.weight && !linear.panels && needs_packing(in.rows);
  int64_t panel = linear.bf16_panels ? kBf16Panel : kInt8Panel;
  if (linear.weight) panel = packs || linear.panels ? product_kernels().panel : kFewRowsPanel;
  if (!packs)
    return multiply_columns(on_all, linear, in, out, activation, 0, linear.columns, panel);
  const int64_t parts = activation && activation->gate ? 2 : 1;
  const int64_t slab = std::max(kSlab / (parts * linear.depth * panel), int64_t{1}) * panel;
  float* memory = thread_scratch<2>(parts * slab * linear.depth);
  for (int64_t first = 0; first < linear.columns; first += slab) {
    const int64_t columns = std::min(slab, linear.columns - first);
    Linear packed = linear, gate{};
    pack(on_all, packed, first, columns, memory);
    Activation gated{};
    if (activation) gated = *activation;
    if (parts == 2) {
      gate = *activation->gate;
      pack(on_all, gate, first, columns, memory + slab * linear.depth);
      gated.gate = &gate;
    }
    multiply_columns(on_all, packed, in, out, activation ? &gated : nullptr, first, columns, panel);
  }
}

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) { m.impl("encoder_pack", TORCH_BOX(&encoder_pack)); }

}  // namespace bert_unpad
