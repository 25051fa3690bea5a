// The beginning of every update on a CPU.
#pragma once

#include <vector>

#include "cpu/parallel.h"
#include "optim/chunks.h"
#include "optim/operators.h"

namespace bert_unpad {

// Moves the steps on and says what this step does to each tensor; counts a step that is skipped.
inline std::vector<Coefficients> advance_steps(const Update& update) {
  const UpdateList& list = update.list;
  const UpdateScalars& scalars = update.scalars;
  const auto value = [](const std::optional<Tensor>& t, float otherwise) {
    return t ? *t->const_data_ptr<float>() : otherwise;
  };
  const float* lr = scalars.lr.const_data_ptr<float>();
  const bool lr_each = scalars.lr.numel() > 1;
  const float scale = value(scalars.grad_scale, 1.0f), norm = value(scalars.norm, 0.0f);
  std::vector<Coefficients> out;
  bool skipped = false;
  for (size_t i = 0; i < list.tensors.size(); ++i) {
    const float own = update.own_norms ? update.own_norms[i] : -1.0f;
    const float step = *list.steps[i] + 1.0f;
    const float variance_step = update.variance_step ? *update.variance_step : step;
    out.push_back(
        coefficients_of(update.rule, step, variance_step, lr[lr_each ? i : 0], scale, norm, own));
    if (!out.back().skipped()) *list.steps[i] += 1.0f;
    skipped = skipped || out.back().skipped();
  }
  if (skipped && scalars.skipped) *scalars.skipped->mutable_data_ptr<int64_t>() += 1;
  return out;
}

// Makes an update that treats each element by itself: chunks over threads.
template <class Kernel>
void update_elements(const Update& update, const Kernel& kernel) {
  const UpdateList& list = update.list;
  const std::vector<Coefficients> coefficients = advance_steps(update);
  const RuleFactors factors = factors_of(update.rule);
  const std::vector<Chunk> chunks = chunks_of(list.tensors);
  parallel_tasks(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
    const Chunk& c = chunks[i];
    if (coefficients[c.tensor].skipped()) return;
    kernel(factors, coefficients[c.tensor], {list.param_dtype, list.grad_dtype},
           list.tensors[c.tensor], c.begin, c.end);
  });
}

}  // namespace bert_unpad
