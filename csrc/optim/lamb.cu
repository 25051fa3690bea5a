// LAMB on a GPU in two passes: moments and norms, then the update, which is computed again from the
// moments instead of being stored.
#include "optim/update.h"

namespace bert_unpad::cuda {
namespace {

template <class P, class G>
BU_KERNEL(kBlockThreads, 3)
lamb_moments_kernel(BU_PARAMS UpdateParams p) {
  const Place at = place_of(p.table, static_cast<int>(blockIdx.x));
  const UpdateEntry& t = p.table.entries[at.entry];
  const Coefficients c = load_coefficients(p, at);
  const RuleFactors& f = p.f;
  float sums[kLambSums] = {};
  if (!c.skipped()) {
    for_elements<kUpdateWidth<P, G>>(at, t.aligned, [&]<int N>(int64_t j) {
      UpdateState<N> s;
      advance<P, G>(f, c, t, j, 0.0f, s);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float decay = s.w[i] * f.weight_decay;
        const float update =
            divide_by_root(s.m[i] * c.momentum, s.v[i], c.denominator, f.eps) + decay;
        sums[0] += s.w[i] * s.w[i];
        sums[1] += update * update;
        if (f.nesterov) {
          const float look = divide_by_root(s.g[i], s.v[i], c.denominator, f.eps) + decay;
          sums[2] += look * look;
        }
      }
    });
  }
  sum_over_block(sums, 0);
  if (threadIdx.y > 0 || threadIdx.x > 0) return;
  const int64_t chunk = p.table.first_chunk + static_cast<int64_t>(blockIdx.x);
#pragma unroll
  for (int k = 0; k < kLambSums; ++k) store_global(p.partials + chunk * kLambSums + k, sums[k]);
}

template <class P, class G>
BU_KERNEL(kBlockThreads, 3)
lamb_apply_kernel(BU_PARAMS UpdateParams p) {
  const Place at = place_of(p.table, static_cast<int>(blockIdx.x));
  const UpdateEntry& t = p.table.entries[at.entry];
  const Coefficients c = load_coefficients(p, at);
  if (c.skipped()) return;
  const RuleFactors& f = p.f;
  float ratios[2] = {1.0f, 1.0f};
  if (f.trust_ratio) {
    const float* sums = p.sums + (p.table.first_tensor + at.entry) * kLambSums;
    const float weights = load_global<float>(sums);
    ratios[0] = trust_ratio(weights, load_global<float>(sums + 1));
    ratios[1] = trust_ratio(weights, load_global<float>(sums + 2));
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

void lamb_moments(const UpdateCall& call, float* partials, float* sums, cudaStream_t stream) {
  for_update_tables(call, [&](UpdateParams p, int chunks) {
    p.partials = partials;
    dispatch_update(call, [&]<class P, class G>() {
      launch(call.op, lamb_moments_kernel<P, G>, dim3(chunks), dim3(kLanesX, kWarpsY),
             sum_over_y_bytes(kLanesX, kWarpsY, kLambSums), stream, p);
    });
  });
  sum_chunks(call.op, partials, kLambSums, chunk_ends(call.tensors), false, sums, stream);
}

void lamb_apply(const UpdateCall& call, const float* sums, cudaStream_t stream) {
  for_update_tables(call, [&](UpdateParams p, int chunks) {
    p.sums = sums;
    dispatch_update(call, [&]<class P, class G>() {
      launch(call.op, lamb_apply_kernel<P, G>, dim3(chunks), dim3(kLanesX, kWarpsY), 0, stream, p);
    });
  });
}

}  // namespace bert_unpad::cuda
