// StableAdamW's first pass on a GPU: moments, and how far gradients exceed what the second moments
// expect. The second one is in apply_ratios.cu.
#include "optim/update.h"

namespace bert_unpad::cuda {
namespace {

template <class P, class G>
BU_KERNEL(kBlockThreads, 3)
stable_adamw_moments_kernel(BU_PARAMS UpdateParams p) {
  const Place at = place_of(p.table, static_cast<int>(blockIdx.x));
  const UpdateEntry& t = p.table.entries[at.entry];
  const Coefficients c = load_coefficients(p, at);
  const RuleFactors& f = p.f;
  const float correction = c.denominator * c.denominator, smallest = f.eps * f.eps;
  float sums[1] = {};
  if (!c.skipped()) {
    for_elements<kUpdateWidth<P, G>>(at, t.aligned, [&]<int N>(int64_t j) {
      UpdateState<N> s;
      advance<P, G>(f, c, t, j, 0.0f, s);
#pragma unroll
      for (int i = 0; i < N; ++i) sums[0] += s.g[i] * s.g[i] / fmaxf(s.v[i] * correction, smallest);
    });
  }
  sum_over_block(sums, 0);
  if (threadIdx.y > 0 || threadIdx.x > 0) return;
  float* out = p.partials + (p.table.first_chunk + static_cast<int64_t>(blockIdx.x)) * kTensorSums;
  store_global(out, static_cast<float>(at.end - at.begin));
  store_global(out + 1, sums[0]);
  store_global(out + 2, 0.0f);
}

}  // namespace

void stable_adamw_moments(const UpdateCall& call, float* partials, float* sums,
                          cudaStream_t stream) {
  for_update_tables(call, [&](UpdateParams p, int chunks) {
    p.partials = partials;
    dispatch_update(call, [&]<class P, class G>() {
      launch(call.op, stable_adamw_moments_kernel<P, G>, dim3(chunks), dim3(kLanesX, kWarpsY),
             sum_over_y_bytes(kLanesX, kWarpsY, 1), stream, p);
    });
  });
  sum_chunks(call.op, partials, kTensorSums, chunk_ends(call.tensors), false, sums, stream);
}

}  // namespace bert_unpad::cuda
