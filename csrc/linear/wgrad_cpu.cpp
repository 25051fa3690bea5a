// CPU binding of the gradient of a linear layer's weight: checks, memory, tasks.
#include "linear/wgrad.h"

#include <algorithm>

#include "common/allocate.h"
#include "common/checks.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace bert_unpad {

namespace {

constexpr int64_t kTokens = 128;  // of a task that rearranges

// fn(block) for all blocks of dweight, in parallel.
template <class F>
void for_each_block(const WgradCpuParams& p, int64_t size, const F& fn) {
  const int64_t across = (p.in + size - 1) / size;
  parallel_tasks((p.out + size - 1) / size * across, [&](int64_t i) {
    const int64_t row = i / across * size, column = i % across * size;
    fn(WgradBlock{row, std::min(size, p.out - row), column, std::min(size, p.in - column)});
  });
}

Tensor bf16_wgrad(WgradCpuParams p, const Tensor& dy, bool bias, const char* op) {
  const WgradBf16Kernels* kernels = wgrad_bf16_kernels();
  check(kernels != nullptr, op, ": expected a CPU that multiplies bf16, got ", isa_name(isa()));
  p.depth = (p.tokens + 31) / 32 * 32;
  Tensor dy_tiles = allocate(dy, {p.depth * p.out});
  Tensor x_panels = allocate(dy, {p.depth * p.in});
  p.dy_tiles = static_cast<bf16*>(dy_tiles.mutable_data_ptr());
  p.x_panels = static_cast<bf16*>(x_panels.mutable_data_ptr());

  const int64_t chunks = (p.depth + kTokens - 1) / kTokens;
  Tensor partials = allocate(dy, {bias ? chunks : 0, p.out}, ScalarType::Float);
  float* sums = bias ? partials.mutable_data_ptr<float>() : nullptr;
  parallel_tasks(chunks, [&](int64_t i) {
    kernels->rearrange(p, i * kTokens, std::min((i + 1) * kTokens, p.depth),
                       sums ? sums + i * p.out : nullptr);
  });
  for_each_block(p, kernels->size, [&](const WgradBlock& block) { kernels->block(p, block); });
  if (!bias) return allocate(dy, {0}, ScalarType::Float);
  return sum_chunks(sums, chunks, p.out, p.out, dy);
}

Tensor fp32_wgrad(const WgradCpuParams& p, const Tensor& dy, bool bias) {
  const WgradFp32Kernels& kernels = wgrad_fp32_kernels();
  Tensor dbias = allocate(dy, {bias ? p.out : 0});
  float* sums = bias ? dbias.mutable_data_ptr<float>() : nullptr;
  for_each_block(p, kernels.size, [&](const WgradBlock& block) {
    kernels.block(p, block, block.column == 0 ? sums : nullptr, thread_scratch(kernels.scratch));
  });
  return dbias;
}

Tensor packed_wgrad_(Tensor dy, Tensor x, Tensor dweight, bool accumulate, bool bias) {
  const char* op = "packed_wgrad_";
  check_shape(dy, {-1, -1}, op, "dy", "[tokens, out_features]");
  check_shape(x, {dy.size(0), -1}, op, "x", "[tokens, in_features]");
  check_shape(dweight, {dy.size(1), x.size(1)}, op, "dweight", "[out_features, in_features]");
  const bool by_bf16 = dy.scalar_type() == ScalarType::BFloat16;
  check(by_bf16 || dy.scalar_type() == ScalarType::Float, op, ": dy must be float32 or bfloat16");
  check_dtype(x, dy.scalar_type(), op, "x", by_bf16 ? "bfloat16 like dy" : "float32 like dy");
  check_dtype(dweight, ScalarType::Float, op, "dweight", "float32");
  for (auto [t, name] : {std::pair{&dy, "dy"}, {&x, "x"}, {&dweight, "dweight"}}) {
    check_contiguous(*t, op, name);
    check_same_device(*t, dy, op, name);
  }
  check(dy.size(1) % 32 == 0, op, ": dy must have a multiple of 32 columns, got ", dy.size(1));
  check(x.size(1) % 32 == 0, op, ": x must have a multiple of 32 columns, got ", x.size(1));

  WgradCpuParams p{};
  p.tokens = dy.size(0);
  p.out = dy.size(1);
  p.in = x.size(1);
  p.dy = dy.const_data_ptr();
  p.x = x.const_data_ptr();
  p.dweight = dweight.mutable_data_ptr<float>();
  p.accumulate = accumulate;
  return by_bf16 ? bf16_wgrad(p, dy, bias, op) : fp32_wgrad(p, dy, bias);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("packed_wgrad_", TORCH_BOX(&packed_wgrad_));
}

}  // namespace bert_unpad
