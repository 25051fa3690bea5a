// Attention in fp32 arithmetic throughout, for fp32 tensors: a warp takes one row (of queries, or
// of keys for dK and dV), a lane one of 32 counterparts at a time. Short rather than fast:
// training on a GPU uses 16-bit activations.
#include <algorithm>

#include "attention/dropout.h"
#include "attention/kernel_parts.h"
#include "attention/launch.h"
#include "attention/query_windows.h"
#include "attention/score_bias.h"

namespace bert_unpad {

inline constexpr int kFp32Warps = 4, kFp32Rows = 16;  // of a block

// What a warp keeps in shared memory: two rows, and two values of each of 32 counterparts.
template <int kHeadDim>
struct Fp32Shared {
  static constexpr uint32_t kWarpBytes = 4 * (2 * kHeadDim + 2 * 32);
  static constexpr uint32_t kBytes = kFp32Warps * kWarpBytes;
  static BU_DEVICE uint32_t row(int i) { return threadIdx.x / 32 * kWarpBytes + 4 * i * kHeadDim; }
  static BU_DEVICE uint32_t value(int i, int lane) { return row(2) + 4 * (32 * i + lane); }
};

// What a block reads of a head of queries, and of the keys that this head reads.
struct Fp32Head {
  HeadRows<const float> q, k, v;
  int64_t first_value;  // of lse and delta
  AttentionDropout dropout;

  BU_DEVICE Fp32Head(const cuda::AttentionCudaParams& a, const AttentionBlock& block, int head)
      : q(a.q, block.q_begin, head),
        k(a.k, block.k_begin, block.kv_head),
        v(a.v, block.k_begin, block.kv_head),
        first_value(head * a.q_tokens + block.q_begin),
        dropout(a.rng, a.keep_threshold, block.sequence * a.heads + head) {}
};

template <int kHeadDim>
BU_DEVICE void stage_row(int i, const float* p) {
  for (int c = threadIdx.x % 32; c < kHeadDim; c += 32)
    store_shared<float>(Fp32Shared<kHeadDim>::row(i) + 4 * c, load_global<float>(p + c));
}

template <int kHeadDim>
BU_DEVICE float dot_with_row(int i, const float* p) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kHeadDim; c += 4) {
    const auto a = load_shared<Vector<float, 4>>(Fp32Shared<kHeadDim>::row(i) + 4 * c);
    const auto b = load_global<Vector<float, 4>>(p + c);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum = fma(a.v[j], b.v[j], sum);
  }
  return sum;
}

// sums[c] += value i of each of `count` counterparts times column lane + 32 c of its row.
template <int kHeadDim>
BU_DEVICE void add_rows(float (&sums)[kHeadDim / 32], int i, const HeadRows<const float>& rows,
                        int first, int count) {
  const int lane = threadIdx.x % 32;
  for (int j = 0; j < count; ++j) {
    const float factor = load_shared<float>(Fp32Shared<kHeadDim>::value(i, j));
#pragma unroll
    for (int c = 0; c < kHeadDim / 32; ++c)
      sums[c] = fma(factor, load_global<float>(rows.at(first + j, lane + 32 * c)), sums[c]);
  }
}

template <int kHeadDim>
BU_DEVICE void store_row(const float (&sums)[kHeadDim / 32], float factor, float* p) {
#pragma unroll
  for (int c = 0; c < kHeadDim / 32; ++c)
    store_global<float>(p + threadIdx.x % 32 + 32 * c, sums[c] * factor);
}

// A lane's score of a query and a key, scaled and with its bias, in base 2; `dot` is q k^T.
BU_DEVICE float biased_score(const AttentionBiasLaunch& p, const AttentionBlock& block,
                             const QueryWindows& windows, int head, int query, int key, float dot,
                             float scale) {
  const ScoreBias<float> bias(p, block, head);
  float s[1][1] = {{dot}};
  bias.add(s, scale, [&](int, int) {
    return ScoreBias<float>::Score{query, bias.start(windows, query), key};
  });
  return s[0][0];
}

// Lane 0 adds up the gradients of a row's scores: values i of `count` counterparts. `pair(j)`: the
// row and counterpart j.
struct QueryAndKey {
  int query, key;
};
template <int kHeadDim, class Pair>
BU_DEVICE void add_gradients(const BucketRows& row, const ScoreBias<float>& bias,
                             const QueryWindows& windows, int i, int count, const Pair& pair) {
  if (threadIdx.x % 32 != 0 || row.first == nullptr) return;
  for (int j = 0; j < count; ++j) {
    const QueryAndKey at = pair(j);
    float* sum = row.first + bias.bucket(bias.start(windows, at.query), at.key);
    store_global<float>(
        sum, load_global<float>(sum) + load_shared<float>(Fp32Shared<kHeadDim>::value(i, j)));
  }
}

template <int kHeadDim, class Launch>
BU_KERNEL(32 * kFp32Warps, 2)
attention_fp32_forward_kernel(BU_PARAMS Launch p) {
  constexpr bool kBias = kHasBias<Launch>;
  using Shared = Fp32Shared<kHeadDim>;
  const AttentionBlock block = attention_block(p);
  const int lane = threadIdx.x % 32;
  const Fp32Head head(p.args, block, block.head);
  const QueryWindows windows(p.args, block);
  const HeadRows<float> out(p.args.out_w, block.q_begin, block.head);
  const float scale = p.unit;
  for (int i = threadIdx.x / 32; i < kFp32Rows; i += kFp32Warps) {
    const int row = block.tile * kFp32Rows + i;
    if (row >= block.q_len) break;
    stage_row<kHeadDim>(0, head.q.at(row, 0));
    sync_warp();
    float row_max = -INFINITY, sum = 0.0f, o[kHeadDim / 32] = {};
    const RowRange seen = windows.keys(row);
    for (int first = seen.begin; first < seen.end; first += 32) {
      const int key = first + lane, count = std::min(32, seen.end - first);
      float s = key < seen.end ? dot_with_row<kHeadDim>(0, head.k.at(key, 0)) * scale : -INFINITY;
      if constexpr (kBias) {
        if (key < seen.end) s = biased_score(p, block, windows, block.head, row, key, s, 1.0f);
      }
      const float most = fmaxf(row_max, warp_max(s));
      const float base = kBias && most == -INFINITY ? 0.0f : most;
      const float scale = exp2_approx(row_max - base);
      float weight = exp2_approx(s - base);
      row_max = most;
      sum = fma(sum, scale, warp_sum(weight));
      if (!head.dropout.keeps(row, key)) weight = 0.0f;
      store_shared<float>(Shared::value(0, lane), weight);
      sync_warp();
#pragma unroll
      for (float& x : o) x *= scale;
      add_rows<kHeadDim>(o, 0, head.v, first, count);
      sync_warp();
    }
    store_row<kHeadDim>(o, sum > 0.0f ? p.keep / sum : sum, out.at(row, 0));
    if (lane == 0)
      store_global<float>(p.args.lse + head.first_value + row, (row_max + log2f(sum)) * kLn2);
  }
}

// dQ and delta.
template <int kHeadDim, class Launch>
BU_KERNEL(32 * kFp32Warps, 2)
attention_fp32_backward_dq_kernel(BU_PARAMS Launch p) {
  constexpr bool kBias = kHasBias<Launch>;
  using Shared = Fp32Shared<kHeadDim>;
  const AttentionBlock block = attention_block(p);
  const int lane = threadIdx.x % 32;
  const Fp32Head head(p.args, block, block.head);
  const QueryWindows windows(p.args, block);
  const HeadRows<const float> out(p.args.out, block.q_begin, block.head);
  const HeadRows<const float> dout(p.args.dout, block.q_begin, block.head);
  const float scale = p.unit, keep = p.keep;
  for (int i = threadIdx.x / 32; i < kFp32Rows; i += kFp32Warps) {
    const int row = block.tile * kFp32Rows + i;
    if (row >= block.q_len) break;
    if constexpr (kBias)
      BucketRows(p.bias.dquery_sums, p, block.q_begin + row, block.head).zero(1, p.bias.buckets);
    stage_row<kHeadDim>(0, head.q.at(row, 0));
    stage_row<kHeadDim>(1, dout.at(row, 0));
    float delta = 0.0f;
    for (int c = lane; c < kHeadDim; c += 32)
      delta = fma(load_global<float>(dout.at(row, c)), load_global<float>(out.at(row, c)), delta);
    delta = warp_sum(delta);
    if (lane == 0) store_global<float>(p.args.delta + head.first_value + row, delta);
    const float offset = load_global<float>(p.args.lse + head.first_value + row) * kLog2e;
    sync_warp();
    float dq[kHeadDim / 32] = {};
    const RowRange seen = windows.keys(row);
    for (int first = seen.begin; first < seen.end; first += 32) {
      const int key = first + lane, count = std::min(32, seen.end - first);
      float gradient = 0.0f;
      if (key < seen.end) {
        float weight;
        if constexpr (kBias)
          weight = exp2_approx(biased_score(p, block, windows, block.head, row, key,
                                            dot_with_row<kHeadDim>(0, head.k.at(key, 0)), scale) -
                               offset);
        else
          weight = exp2_approx(fma(dot_with_row<kHeadDim>(0, head.k.at(key, 0)), scale, -offset));
        if (head.dropout.keeps(row, key))
          gradient = dot_with_row<kHeadDim>(1, head.v.at(key, 0)) * keep;
        gradient = weight * (gradient - delta);
      }
      store_shared<float>(Shared::value(0, lane), gradient);
      sync_warp();
      if constexpr (kBias)
        add_gradients<kHeadDim>(BucketRows(p.bias.dquery_sums, p, block.q_begin + row, block.head),
                                ScoreBias<float>(p, block, block.head), windows, 0, count,
                                [&](int j) { return QueryAndKey{row, first + j}; });
      add_rows<kHeadDim>(dq, 0, head.k, first, count);
      sync_warp();
    }
    store_row<kHeadDim>(dq, p.args.scale,
                        HeadRows<float>(p.args.dq, block.q_begin, block.head).at(row, 0));
  }
}

// dK and dV.
template <int kHeadDim, class Launch>
BU_KERNEL(32 * kFp32Warps, 2)
attention_fp32_backward_kernel(BU_PARAMS Launch p) {
  constexpr bool kBias = kHasBias<Launch>;
  using Shared = Fp32Shared<kHeadDim>;
  const AttentionBlock block = attention_block<true>(p);
  const int lane = threadIdx.x % 32;
  const HeadRows<const float> k(p.args.k, block.k_begin, block.kv_head);
  const HeadRows<const float> v(p.args.v, block.k_begin, block.kv_head);
  const QueryWindows windows(p.args, block);
  const float scale = p.unit, keep = p.keep;
  for (int i = threadIdx.x / 32; i < kFp32Rows; i += kFp32Warps) {
    const int row = block.tile * kFp32Rows + i;
    if (row >= block.k_len) break;
    stage_row<kHeadDim>(0, k.at(row, 0));
    stage_row<kHeadDim>(1, v.at(row, 0));
    sync_warp();
    float dk[kHeadDim / 32] = {}, dv[kHeadDim / 32] = {};
    const RowRange rows = windows.queries(row, row);
    for (int g = 0; g < p.group; ++g) {
      const Fp32Head of(p.args, block, block.head + g);
      const HeadRows<const float> dout(p.args.dout, block.q_begin, block.head + g);
      if constexpr (kBias)
        BucketRows(p.bias.dkey_sums, p, block.k_begin + row, block.head + g)
            .zero(1, p.bias.buckets);
      for (int first = rows.begin; first < rows.end; first += 32) {
        const int query = first + lane, count = std::min(32, rows.end - first);
        float weight = 0.0f, gradient = 0.0f;
        int bias_head = block.head + g;
        // There are no registers to keep pointers to the bias in.
        if constexpr (kBias)
          bias_head = static_cast<int>(keep_in_register(static_cast<uint32_t>(bias_head)));
        if (query < rows.end && windows.keys(query).holds(row, row)) {
          const float offset = load_global<float>(p.args.lse + of.first_value + query) * kLog2e;
          if constexpr (kBias)
            weight = exp2_approx(biased_score(p, block, windows, bias_head, query, row,
                                              dot_with_row<kHeadDim>(0, of.q.at(query, 0)), scale) -
                                 offset);
          else
            weight = exp2_approx(fma(dot_with_row<kHeadDim>(0, of.q.at(query, 0)), scale, -offset));
          const bool kept = of.dropout.keeps(query, row);
          if (kept) gradient = dot_with_row<kHeadDim>(1, dout.at(query, 0)) * keep;
          gradient =
              weight * (gradient - load_global<float>(p.args.delta + of.first_value + query));
          if (!kept) weight = 0.0f;
        }
        store_shared<float>(Shared::value(0, lane), weight);
        store_shared<float>(Shared::value(1, lane), gradient);
        sync_warp();
        if constexpr (kBias)
          add_gradients<kHeadDim>(BucketRows(p.bias.dkey_sums, p, block.k_begin + row, bias_head),
                                  ScoreBias<float>(p, block, bias_head), windows, 1, count,
                                  [&](int j) { return QueryAndKey{first + j, row}; });
        add_rows<kHeadDim>(dv, 0, dout, first, count);
        add_rows<kHeadDim>(dk, 1, of.q, first, count);
        sync_warp();
      }
    }
    store_row<kHeadDim>(dk, p.args.scale,
                        HeadRows<float>(p.args.dk, block.k_begin, block.kv_head).at(row, 0));
    store_row<kHeadDim>(dv, keep,
                        HeadRows<float>(p.args.dv, block.k_begin, block.kv_head).at(row, 0));
  }
}

}  // namespace bert_unpad

namespace bert_unpad::cuda {
namespace {

constexpr int kThreads = 32 * kFp32Warps;

// f.operator()<head dim, AttentionLaunch or AttentionBiasLaunch>()
template <class F>
void dispatch_fp32(const AttentionRun& run, const F& f) {
  dispatch_head_dim(run.args.head_dim, [&]<int kHeadDim>() {
    if (run.bias.bucket != nullptr) return f.template operator()<kHeadDim, AttentionBiasLaunch>();
    f.template operator()<kHeadDim, AttentionLaunch>();
  });
}

}  // namespace

void launch_fp32_forward(const AttentionRun& run, cudaStream_t stream) {
  dispatch_fp32(run, [&]<int kHeadDim, class Launch>() {
    launch_grid(kForwardOp, attention_fp32_forward_kernel<kHeadDim, Launch>, kThreads,
                Fp32Shared<kHeadDim>::kBytes, run, run.args.heads, run.args.max_q, kFp32Rows,
                stream);
  });
}

void launch_fp32_backward(const AttentionRun& run, cudaStream_t stream) {
  dispatch_fp32(run, [&]<int kHeadDim, class Launch>() {
    launch_grid(kBackwardOp, attention_fp32_backward_dq_kernel<kHeadDim, Launch>, kThreads,
                Fp32Shared<kHeadDim>::kBytes, run, run.args.heads, run.args.max_q, kFp32Rows,
                stream);
    launch_grid(kBackwardOp, attention_fp32_backward_kernel<kHeadDim, Launch>, kThreads,
                Fp32Shared<kHeadDim>::kBytes, run, run.args.kv_heads, run.args.max_k, kFp32Rows,
                stream);
  });
}

}  // namespace bert_unpad::cuda
