// Cross-entropy of masked tokens: what the bindings hand to the CPU kernels.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "cpu/isa.h"

namespace bert_unpad {

// Logits are [rows, columns], contiguous; only the first `vocab` columns count.
struct LossCpuParams {
  DType dtype;
  int64_t columns, vocab;
  int64_t ignore_index;
  const void* logits;
  const int64_t* labels;
  float* lse;     // [rows]; 0 where the row is ignored
  float dloss;    // backward pass: gradient of the sum
  void* dlogits;  // may be the logits themselves
};

struct LossKernels {
  // Of one row: the log-sum-exp goes to lse[row], the loss is returned, and `correct` is set if no
  // logit is larger than the label's and no earlier one equals it.
  float (*forward)(const LossCpuParams&, int64_t row, bool& correct);
  void (*backward)(const LossCpuParams&, int64_t row);
};
BU_ISA_TABLE(LossKernels, loss_kernels)

}  // namespace bert_unpad
