// CUDA binding of rotary position embeddings: steps, stream.
#include "rotary/rotary_cuda.h"

#include "cuda/binding.h"
#include "rotary/arguments.h"

namespace bert_unpad::cuda {
namespace {

void rotate(const Tensor& x, const Tensor& out, const Tensor& positions,
            const RotarySettings& settings, const char* op) {
  RotaryCudaParams p{};
  set_rotary(p, x, positions, settings, op);
  set_rotary_out(p, out);
  const Call call(x, op);
  p.tokens = x.size(0);
  for (int64_t i = 0; i < p.pairs; ++i) p.steps[i] = settings.step(i);
  rotary(p, call.stream);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("rotary_", TORCH_BOX(&bert_unpad::rotary_<rotate>));
  m.impl("rotary", TORCH_BOX(&bert_unpad::rotary<rotate>));
}

}  // namespace bert_unpad::cuda
