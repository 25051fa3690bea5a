// Updates by a variance that no longer changes, on a GPU. As on a CPU (update_simd.cpp).
#include "optim/update.h"

namespace bert_unpad::cuda {
namespace {

template <class P, class G>
BU_KERNEL(kBlockThreads, 3)
frozen_adam_kernel(BU_PARAMS UpdateParams p) {
  const Place at = place_of(p.table, static_cast<int>(blockIdx.x));
  const UpdateEntry& t = p.table.entries[at.entry];
  const Coefficients c = load_coefficients(p, at);
  if (c.skipped()) return;
  const RuleFactors& f = p.f;
  const float keep = 1.0f - c.lr * f.weight_decay, step = c.lr * c.momentum;
  for_elements<kUpdateWidth<P, G>>(at, t.aligned, [&]<int N>(int64_t j) {
    float w[N], m[N], v[N];
    load_weight<P>(t, j, w);
    load_floats<G, N>(static_cast<const G*>(t.grad) + j, m);
    load_floats<float, N>(t.exp_avg_sq + j, v);
#pragma unroll
    for (int i = 0; i < N; ++i) m[i] *= c.gradient * f.gradient1;
    if (f.decay1 != 1.0f) {
      float old[N];
      load_floats<float, N>(t.exp_avg + j, old);
#pragma unroll
      for (int i = 0; i < N; ++i) m[i] = (old[i] - old[i] * f.decay1) + m[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!(v[i] > 0.0f)) m[i] = 0.0f;
      const float change = divide_by_root(m[i] * step, v[i], c.denominator, f.eps);
      w[i] = w[i] * keep - (v[i] > 0.0f ? change : 0.0f);
    }
    store_vector<float, N>(t.exp_avg + j, m);
    store_weight<P>(t, j, w);
  });
}

struct FrozenLambParams {
  UpdateParams update;
  const float* norm;  // null: nothing is checked
};
static_assert(sizeof(FrozenLambParams) <= 4096);

// The largest of the block's values, in its first thread. From `shared` on, a float for each warp
// must be free.
BU_DEVICE float block_max(float x, uint32_t shared) {
  x = warp_max(x);
  if (threadIdx.x == 0) store_shared(shared + 4 * threadIdx.y, x);
  sync_block();
  if (threadIdx.y > 0) return 0.0f;
  return warp_max(threadIdx.x < kWarpsY ? load_shared<float>(shared + 4 * threadIdx.x) : 0.0f);
}

constexpr uint32_t kMaxOffset = sum_over_y_bytes(kLanesX, kWarpsY, 2);
constexpr uint32_t kSharedBytes = kMaxOffset + kWarpsY * sizeof(float);

// Two sums and a maximum of the block's threads, to `out`.
BU_DEVICE void store_block(float (&sums)[2], float largest, float* out) {
  sum_over_block(sums, 0);
  largest = block_max(largest, kMaxOffset);
  if (threadIdx.y > 0 || threadIdx.x > 0) return;
  store_global(out, sums[0]);
  store_global(out + 1, sums[1]);
  store_global(out + 2, largest);
}

template <class P, class G>
BU_KERNEL(kBlockThreads, 3)
frozen_lamb_sums_kernel(BU_PARAMS FrozenLambParams p) {
  const Place at = place_of(p.update.table, static_cast<int>(blockIdx.x));
  const UpdateEntry& t = p.update.table.entries[at.entry];
  const RuleFactors& f = p.update.f;
  const float back = 1.0f / f.decay1;
  float sums[2] = {}, largest = 0.0f;
  if (p.norm == nullptr || is_finite(load_global<float>(p.norm))) {
    for_elements<kUpdateWidth<P, G>>(at, t.aligned, [&]<int N>(int64_t j) {
      float w[N], m[N], old[N], v[N], fresh[N];
      load_floats<P, N>(static_cast<const P*>(t.param) + j, w);
      load_floats<G, N>(static_cast<const G*>(t.grad) + j, m);
      load_floats<float, N>(t.exp_avg + j, old);
      load_floats<float, N>(t.exp_avg_sq + j, v);
      load_floats<float, N>(t.master + j, fresh);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float g = (m[i] - (old[i] - old[i] * f.decay1)) * back;
        fresh[i] = (fresh[i] - fresh[i] * f.decay2) + g * g * f.decay2;
        const float root = sqrtf(v[i]);
        const float change = root > 0.0f ? m[i] / (root + f.eps) : 0.0f;
        const float whole = change + w[i] * f.weight_decay;
        sums[0] += change * change;
        sums[1] += whole * whole;
        if (root > 0.0f) largest = fmaxf(largest, (root + f.eps) / (sqrtf(fresh[i]) + f.eps));
      }
      store_vector<float, N>(t.master + j, fresh);
    });
  }
  const int64_t chunk = p.update.table.first_chunk + static_cast<int64_t>(blockIdx.x);
  store_block(sums, largest, p.update.partials + chunk * kFrozenLambSums);
}

constexpr int kTensorsAtOnce = 512;

struct CombineParams {
  const float* partials;
  float* out;
  int first[kTensorsAtOnce + 1];
};

// A block a tensor.
BU_KERNEL(kBlockThreads, 4) frozen_lamb_combine_kernel(BU_PARAMS CombineParams p) {
  const int tensor = static_cast<int>(blockIdx.x), end = p.first[tensor + 1];
  float sums[2] = {}, largest = 0.0f;
  for (int i = p.first[tensor] + static_cast<int>(threadIdx.y * kLanesX + threadIdx.x); i < end;
       i += kBlockThreads) {
    const float* of_chunk = p.partials + static_cast<int64_t>(i) * kFrozenLambSums;
    sums[0] += load_global<float>(of_chunk);
    sums[1] += load_global<float>(of_chunk + 1);
    largest = fmaxf(largest, load_global<float>(of_chunk + 2));
  }
  store_block(sums, largest, p.out + static_cast<int64_t>(tensor) * kFrozenLambSums);
}

}  // namespace

void frozen_adam(const UpdateCall& call, cudaStream_t stream) {
  for_update_tables(call, [&](const UpdateParams& p, int chunks) {
    dispatch_update(call, [&]<class P, class G>() {
      launch(call.op, frozen_adam_kernel<P, G>, dim3(chunks), dim3(kLanesX, kWarpsY), 0, stream, p);
    });
  });
}

void frozen_lamb_sums(const UpdateCall& call, const float* norm, float* partials, float* sums,
                      cudaStream_t stream) {
  const dim3 block(kLanesX, kWarpsY);
  for_update_tables(call, [&](UpdateParams p, int chunks) {
    p.partials = partials;
    dispatch_update(call, [&]<class P, class G>() {
      launch(call.op, frozen_lamb_sums_kernel<P, G>, dim3(chunks), block, kSharedBytes, stream,
             FrozenLambParams{p, norm});
    });
  });
  const std::vector<int> ends = chunk_ends(call.tensors);
  for (size_t begin = 0; begin < ends.size(); begin += kTensorsAtOnce) {
    const int count = static_cast<int>(std::min<size_t>(kTensorsAtOnce, ends.size() - begin));
    CombineParams p{partials, sums + begin * kFrozenLambSums, {}};
    p.first[0] = begin == 0 ? 0 : ends[begin - 1];
    for (int i = 0; i < count; ++i) p.first[i + 1] = ends[begin + i];
    launch(call.op, frozen_lamb_combine_kernel, dim3(count), block, kSharedBytes, stream, p);
  }
}

}  // namespace bert_unpad::cuda
