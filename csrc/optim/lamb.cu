// LAMB's first pass on a GPU: moments and norms. The second one is in apply_ratios.cu.
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
  float sums[kTensorSums] = {};
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
  for (int k = 0; k < kTensorSums; ++k) store_global(p.partials + chunk * kTensorSums + k, sums[k]);
}

}  // namespace

void lamb_moments(const UpdateCall& call, float* partials, float* sums, cudaStream_t stream) {
  for_update_tables(call, [&](UpdateParams p, int chunks) {
    p.partials = partials;
    dispatch_update(call, [&]<class P, class G>() {
      launch(call.op, lamb_moments_kernel<P, G>, dim3(chunks), dim3(kLanesX, kWarpsY),
             sum_over_y_bytes(kLanesX, kWarpsY, kTensorSums), stream, p);
    });
  });
  sum_chunks(call.op, partials, kTensorSums, chunk_ends(call.tensors), false, sums, stream);
}

}  // namespace bert_unpad::cuda
