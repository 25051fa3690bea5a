// Adam on a CPU: chunks over threads.
#include "optim/operators.h"
#include "optim/steps_cpu.h"

namespace bert_unpad {

namespace {

struct CpuAdam {
  CpuAdam(const char*, const Tensor&) {}

  void adam(const Update& update) const { update_elements(update, update_kernels().adam); }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) { m.impl("adam_", TORCH_BOX(&adam_<CpuAdam>)); }

}  // namespace bert_unpad
