// Adam on a GPU, limited by memory: every array is read and written once. And what Adam and LAMB
// begin with: steps and coefficients.
#include "optim/update.h"

namespace bert_unpad::cuda {
namespace {

constexpr int kStepTensors = 256;

struct StepParams {
  UpdateRule rule;
  DeviceScalars scalars;
  Coefficients* coefficients;
  int count, first;
  float* steps[kStepTensors];
};

BU_KERNEL(kStepTensors, 1) step_kernel(BU_PARAMS StepParams p) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= p.count) return;
  const DeviceScalars& s = p.scalars;
  const auto value = [](const float* q, float otherwise) {
    return q == nullptr ? otherwise : load_global<float>(q);
  };
  const float step = load_global<float>(p.steps[i]) + 1.0f;
  const Coefficients c = coefficients_of(
      p.rule, step, value(s.variance_step, step), value(s.lr + (s.lr_each ? p.first + i : 0), 0.0f),
      value(s.grad_scale, 1.0f), value(s.norm, 0.0f),
      value(s.own_norms == nullptr ? nullptr : s.own_norms + p.first + i, -1.0f));
  store_global(p.coefficients + p.first + i, c);
  if (!c.skipped())
    store_global(p.steps[i], step);
  else if (p.first + i == 0 && s.skipped != nullptr)
    store_global(s.skipped, load_global<int64_t>(s.skipped) + 1);
}

template <class P, class G>
BU_KERNEL(kBlockThreads, 3)
adam_kernel(BU_PARAMS UpdateParams p) {
  const Place at = place_of(p.table, static_cast<int>(blockIdx.x));
  const UpdateEntry& t = p.table.entries[at.entry];
  const Coefficients c = load_coefficients(p, at);
  if (c.skipped()) return;
  const RuleFactors& f = p.f;
  const float keep = f.decoupled ? 1.0f - c.lr * f.weight_decay : 1.0f;
  const float l2 = f.decoupled ? 0.0f : f.weight_decay;
  const float step = c.lr * c.momentum;
  for_elements<kUpdateWidth<P, G>>(at, t.aligned, [&]<int N>(int64_t j) {
    UpdateState<N> s;
    advance<P, G>(f, c, t, j, l2, s);
#pragma unroll
    for (int i = 0; i < N; ++i)
      s.w[i] = s.w[i] * keep - divide_by_root(s.m[i] * step, s.v[i], c.denominator, f.eps);
    store_weight<P>(t, j, s.w);
  });
}

}  // namespace

void advance_steps(const char* op, const UpdateRule& rule, const std::vector<float*>& steps,
                   const DeviceScalars& scalars, Coefficients* coefficients, cudaStream_t stream) {
  for (size_t first = 0; first < steps.size(); first += kStepTensors) {
    StepParams p{rule, scalars, coefficients, 0, static_cast<int>(first), {}};
    p.count = static_cast<int>(std::min<size_t>(kStepTensors, steps.size() - first));
    std::copy_n(steps.begin() + static_cast<int64_t>(first), p.count, p.steps);
    launch(op, step_kernel, dim3(1), dim3(kStepTensors), 0, stream, p);
  }
}

void adam(const UpdateCall& call, cudaStream_t stream) {
  for_update_tables(call, [&](const UpdateParams& p, int chunks) {
    dispatch_update(call, [&]<class P, class G>() {
      launch(call.op, adam_kernel<P, G>, dim3(chunks), dim3(kLanesX, kWarpsY), 0, stream, p);
    });
  });
}

}  // namespace bert_unpad::cuda
