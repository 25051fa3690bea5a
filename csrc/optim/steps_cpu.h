// The beginning of every update on a CPU.
#pragma once

#include <vector>

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

}  // namespace bert_unpad
