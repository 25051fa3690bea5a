// Adam on a CPU: chunks over threads.
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "optim/chunks.h"
#include "optim/operators.h"
#include "optim/steps_cpu.h"

namespace bert_unpad {

BU_ISA_TABLE(UpdateKernels, update_kernels)

namespace {

struct CpuAdam {
  CpuAdam(const char*, const Tensor&) {}

  void adam(const Update& update) const {
    const UpdateList& list = update.list;
    const std::vector<Coefficients> coefficients = advance_steps(update);
    const RuleFactors factors = factors_of(update.rule);
    const std::vector<Chunk> chunks = chunks_of(list.tensors);
    const UpdateKernels& kernels = update_kernels();
    parallel_tasks(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
      const Chunk& c = chunks[i];
      if (coefficients[c.tensor].skipped()) return;
      kernels.adam(factors, coefficients[c.tensor], list.param_dtype, list.grad_dtype,
                   list.tensors[c.tensor], c.begin, c.end);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) { m.impl("adam_", TORCH_BOX(&adam_<CpuAdam>)); }

}  // namespace bert_unpad
