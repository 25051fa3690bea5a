// CPU binding of rotary position embeddings: steps, tokens over threads.
#include "rotary/rotary.h"

#include "cpu/rows.h"
#include "rotary/arguments.h"

namespace bert_unpad {

namespace {

void rotate(const Tensor& x, const Tensor& out, const Tensor& positions,
            const RotarySettings& settings, const char* op) {
  RotaryCpuParams p{};
  set_rotary(p, x, positions, settings, op);
  set_rotary_out(p, out);
  for (int64_t i = 0; i < p.pairs; ++i) {
    const uint64_t step = settings.step(i);
    const auto put = [&](int64_t at, uint64_t value) {
      p.step_low[at] = static_cast<uint32_t>(value);
      p.step_high[at] = static_cast<uint32_t>(value >> 32);
    };
    if (p.interleaved) put(2 * i, 0 - step);
    put(p.interleaved ? 2 * i + 1 : i, step);
  }
  if (p.heads == 0) return;
  const RotaryKernels& kernels = rotary_kernels();
  RowChunks(x.size(0)).for_each(
      [&](int64_t, int64_t begin, int64_t end) { kernels.rotate(p, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("rotary_", TORCH_BOX(&rotary_<rotate>));
  m.impl("rotary", TORCH_BOX(&rotary<rotate>));
}

}  // namespace bert_unpad
