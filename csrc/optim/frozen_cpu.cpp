// Updates by a variance that no longer changes, on a CPU: chunks over threads.
#include "cpu/parallel.h"
#include "optim/chunks.h"
#include "optim/operators.h"
#include "optim/steps_cpu.h"

namespace bert_unpad {

namespace {

struct CpuFrozen {
  CpuFrozen(const char*, const Tensor&) {}

  void frozen_adam(const Update& update) const {
    update_elements(update, update_kernels().frozen_adam);
  }

  void frozen_lamb_sums(const UpdateRule& rule, const UpdateList& list, const float* norm,
                        Tensor& out) const {
    std::vector<int64_t> first;
    const std::vector<Chunk> chunks = chunks_of(list.tensors, &first);
    std::vector<double> partials(chunks.size() * kFrozenLambSums);
    const RuleFactors factors = factors_of(rule);
    const UpdateKernels& kernels = update_kernels();
    if (norm == nullptr || is_finite(*norm))
      parallel_tasks(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
        const Chunk& c = chunks[i];
        kernels.frozen_lamb_sums(factors, {list.param_dtype, list.grad_dtype},
                                 list.tensors[c.tensor], c.begin, c.end,
                                 partials.data() + i * kFrozenLambSums);
      });
    auto* sums = out.mutable_data_ptr<float>();
    for (size_t t = 0; t < list.tensors.size(); ++t) {
      double total[kFrozenLambSums] = {};
      for (int64_t i = first[t]; i < first[t + 1]; ++i) {
        const double* of_chunk = partials.data() + i * kFrozenLambSums;
        total[0] += of_chunk[0];
        total[1] += of_chunk[1];
        total[2] = std::max(total[2], of_chunk[2]);
      }
      for (int k = 0; k < kFrozenLambSums; ++k)
        sums[t * kFrozenLambSums + k] = static_cast<float>(total[k]);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("frozen_adam_", TORCH_BOX(&frozen_adam_<CpuFrozen>));
  m.impl("frozen_lamb_sums_", TORCH_BOX(&frozen_lamb_sums_<CpuFrozen>));
}

}  // namespace bert_unpad
