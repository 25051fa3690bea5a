// The second pass of LAMB and StableAdamW on a GPU: the update, computed again from the moments
// instead of being stored, times a ratio from the sums of the first pass.
#include "optim/update.h"

namespace bert_unpad::cuda {
namespace {

template <class P, class G>
BU_KERNEL(kBlockThreads, 3)
apply_ratios_kernel(BU_PARAMS UpdateParams p) {
  const Place at = place_of(p.table, static_cast<int>(blockIdx.x));
  const UpdateEntry& t = p.table.entries[at.entry];
  const Coefficients c = load_coefficients(p, at);
  if (c.skipped()) return;
  const RuleFactors& f = p.f;
  float ratios[2] = {1.0f, 1.0f};
  if (f.ratio != Ratio::kOne) {
    const float* sums = p.sums + (p.table.first_tensor + at.entry) * kTensorSums;
    const float numerator = load_global<float>(sums);
    ratios[0] = ratio_of(f.ratio, numerator, load_global<float>(sums + 1));
    ratios[1] = ratio_of(f.ratio, numerator, load_global<float>(sums + 2));
  }
  // LANS: d = beta1 ratio (m + decay w) + (1 - beta1) ratio' (g + decay w).
  const float by_momentum = c.lr * ratios[0] * (f.nesterov ? f.beta1 : 1.0f);
  const float by_gradient = f.nesterov ? c.lr * ratios[1] * f.decay1 : 0.0f;
  const float keep = 1.0f - (by_momentum + by_gradient) * f.weight_decay;
  const float of_momentum = by_momentum * c.momentum, of_gradient = by_gradient * c.gradient;
  for_elements<kUpdateWidth<P, G>>(at, t.aligned, [&]<int N>(int64_t j) {
    float w[N], m[N], v[N], g[N] = {};
    load_weight<P>(t, j, w);
    load_floats<float, N>(t.exp_avg + j, m);
    load_floats<float, N>(t.exp_avg_sq + j, v);
    if (f.nesterov) load_floats<G, N>(static_cast<const G*>(t.grad) + j, g);
#pragma unroll
    for (int i = 0; i < N; ++i)
      w[i] = w[i] * keep -
             divide_by_root(m[i] * of_momentum + g[i] * of_gradient, v[i], c.denominator, f.eps);
    store_weight<P>(t, j, w);
  });
}

}  // namespace

int64_t update_chunks(const std::vector<UpdateTensor>& tensors) { return total_chunks(tensors); }

void apply_ratios(const UpdateCall& call, const float* sums, cudaStream_t stream) {
  for_update_tables(call, [&](UpdateParams p, int chunks) {
    p.sums = sums;
    dispatch_update(call, [&]<class P, class G>() {
      launch(call.op, apply_ratios_kernel<P, G>, dim3(chunks), dim3(kLanesX, kWarpsY), 0, stream,
             p);
    });
  });
}

}  // namespace bert_unpad::cuda
