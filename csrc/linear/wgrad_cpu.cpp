// CPU binding of the weight gradient of a linear layer in bf16: checks, memory, tasks.
#include "linear/wgrad.h"

#include <algorithm>

#include "common/checks.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bert_unpad {

BU_AMX_TABLE(WgradKernels, wgrad_kernels)

namespace {

constexpr int64_t kTokens = 128;  // of a task that rearranges
constexpr int64_t kBlock = 256;   // rows and columns of dweight of a task that multiplies

Tensor tile_wgrad_(Tensor dy, Tensor x, Tensor dweight, bool accumulate, bool bias) {
  const char* op = "tile_wgrad_";
  check_shape(dy, {-1, -1}, op, "dy", "[tokens, out_features]");
  check_shape(x, {dy.size(0), -1}, op, "x", "[tokens, in_features]");
  check_shape(dweight, {dy.size(1), x.size(1)}, op, "dweight", "[out_features, in_features]");
  check_dtype(dy, ScalarType::BFloat16, op, "dy", "bfloat16");
  check_dtype(x, ScalarType::BFloat16, op, "x", "bfloat16");
  check_dtype(dweight, ScalarType::Float, op, "dweight", "float32");
  for (auto [t, name] : {std::pair{&dy, "dy"}, {&x, "x"}, {&dweight, "dweight"}}) {
    check_contiguous(*t, op, name);
    check_same_device(*t, dy, op, name);
  }
  check(dy.size(1) % 32 == 0, op, ": dy must have a multiple of 32 columns, got ", dy.size(1));
  check(x.size(1) % 32 == 0, op, ": x must have a multiple of 32 columns, got ", x.size(1));
  check(isa() == Isa::kAmx, op, ": expected a CPU with AMX, got ", isa_name(isa()));

  WgradCpuParams p{};
  p.tokens = dy.size(0);
  p.out = dy.size(1);
  p.in = x.size(1);
  p.depth = (p.tokens + 31) / 32 * 32;
  p.dy = static_cast<const bf16*>(dy.const_data_ptr());
  p.x = static_cast<const bf16*>(x.const_data_ptr());
  p.dweight = dweight.mutable_data_ptr<float>();
  p.accumulate = accumulate;
  Tensor dy_tiles = torch::stable::new_empty(dy, {p.depth * p.out});
  Tensor x_panels = torch::stable::new_empty(dy, {p.depth * p.in});
  p.dy_tiles = static_cast<bf16*>(dy_tiles.mutable_data_ptr());
  p.x_panels = static_cast<bf16*>(x_panels.mutable_data_ptr());

  const int64_t chunks = (p.depth + kTokens - 1) / kTokens;
  Tensor partials = torch::stable::new_empty(dy, {bias ? chunks : 0, p.out}, ScalarType::Float);
  float* sums = bias ? partials.mutable_data_ptr<float>() : nullptr;
  parallel_tasks(chunks, [&](int64_t i) {
    wgrad_kernels()->rearrange(p, i * kTokens, std::min((i + 1) * kTokens, p.depth),
                               sums ? sums + i * p.out : nullptr);
  });
  const int64_t across = (p.in + kBlock - 1) / kBlock;
  parallel_tasks((p.out + kBlock - 1) / kBlock * across, [&](int64_t i) {
    const int64_t row = i / across * kBlock, column = i % across * kBlock;
    wgrad_kernels()->block(p, row, std::min(kBlock, p.out - row), column,
                           std::min(kBlock, p.in - column));
  });
  if (!bias) return torch::stable::new_empty(dy, {0}, ScalarType::Float);
  return sum_chunks(sums, chunks, p.out, p.out, dy);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) { m.impl("tile_wgrad_", TORCH_BOX(&tile_wgrad_)); }

}  // namespace bert_unpad
