// dK and dV with wgmma (sm_90a), for head dims 64 and 128, where the backward pass is not fused:
// what backward_kernel.h computes there, after backward_dq_wgmma.h, which writes delta.
//
// A block of one warpgroup takes 64 keys, a warp 16 of them, as in backward_wgmma.h. It passes over
// the heads that read the keys, and over the tiles of 64 queries that see one of them. The products
// with q and dout are not waited for before the next tile's scores are begun: one wait serves both.
// So a tile is still read when the next one is taken in, and a third is on its way. Meanwhile the
// score gradients are added to the sums of a position bias. With 128 columns rows of K and V are
// operands in shared memory, which has no room for a third stage: each tile's products are waited
// for.
#pragma once

#include <algorithm>

#include "attention/backward_wgmma.h"
#include "attention/query_windows.h"
#include "attention/score_bias.h"

namespace bert_unpad {

// Where things lie in shared memory. The score gradients of a position bias follow.
template <int kHeadDim>
struct WgmmaKeyGradientShared {
  static constexpr uint32_t kTile = SharedTile<kHeadDim>::bytes(64);
  // Three stages, each a tile of q and one of dout; with 128 columns two, and a tile of k and one
  // of v.
  static constexpr int kStages = kHeadDim == 128 ? 2 : 3;
  static BU_HD uint32_t stage(int i) { return static_cast<uint32_t>(i % kStages) * 2 * kTile; }
  static constexpr uint32_t kKeys = 4 * kTile;
  // Two stages of what is known of each query of a tile: lse; delta, times the rate of what dropout
  // keeps; the first key that it sees, and how many; with a bias its place_of_key_0.
  static BU_HD uint32_t values(int i) { return 6 * kTile + i % 2 * 1280; }
  static constexpr uint32_t kDelta = 256, kSeen = 512, kStarts = 1024;  // from there on
  static constexpr uint32_t kBytes = 6 * kTile + 2 * 1280;
};

// Copies these values of a tile's queries, each thread a part of them. From start() on they are on
// their way from global memory, lse and delta by a copy: wgmma_fence() waits for all loads into
// registers. finish() works out the others.
template <int kHeadDim, class Launch>
class WgmmaQueryValues {
  using Shared = WgmmaKeyGradientShared<kHeadDim>;
  const Launch& p_;
  const AttentionBlock& block_;
  const QueryWindows& windows_;
  int position_ = 0;

 public:
  BU_DEVICE WgmmaQueryValues(const Launch& p, const AttentionBlock& block,
                             const QueryWindows& windows)
      : p_(p), block_(block), windows_(windows) {}

  BU_DEVICE void start(int head, int tile, int stage) {
    const int row = tile * 64 + static_cast<int>(threadIdx.x) % 64;
    const cuda::AttentionCudaParams& a = p_.args;
    const float* from = (threadIdx.x < 64 ? a.lse : a.delta) + head * a.q_tokens;
    const uint32_t to = Shared::values(stage) + 4 * threadIdx.x;
    if (row < block_.q_len)
      copy_async_4(to, from + block_.q_begin + row, true);
    else  // the weights of queries beyond the last one are zeros, whatever their bias
      store_shared<float>(to, threadIdx.x < 64 ? INFINITY : 0.0f);
    if (kHasBias<Launch> || windows_.bounded()) position_ = windows_.position(row);
  }
  BU_DEVICE void finish(int stage) const {
    const uint32_t to = Shared::values(stage);
    if (threadIdx.x >= 64) return;
    if constexpr (kHasBias<Launch>)
      store_shared<int32_t>(to + Shared::kStarts + 4 * threadIdx.x,
                            place_of_key_0(p_.bias, position_, block_.k_len));
    if (!windows_.bounded()) return;
    const RowRange seen = windows_.keys_at(position_);
    store_shared<Vector<int32_t, 2>>(to + Shared::kSeen + 8 * threadIdx.x,
                                     {seen.begin, seen.end - seen.begin});
  }
};

// Reads the starts of a tile's queries, which lie in shared memory from `at` on.
struct WgmmaQueryStarts {
  uint32_t at = 0;
  template <class T>
  BU_DEVICE int operator()(const ScoreBias<T>&, int query) const {
    return load_shared<int32_t>(at + query % 64 * 4);
  }
};

// Zeroes weights, [keys, queries] with `first_key` the warp's first, of keys that a query does not
// see. `seen`: where the ranges of the tile's queries begin in shared memory.
BU_DEVICE void zero_unseen(float (&weights)[8][4], int first_key, uint32_t seen) {
  const int lane = threadIdx.x % 32, key = first_key + lane / 4;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    // Of queries 8 n + 2 t and 8 n + 2 t + 1.
    const auto ranges = load_shared<Vector<int32_t, 4>>(seen + 64 * n + 16 * (lane % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int begin = ranges.v[i % 2 * 2], count = ranges.v[i % 2 * 2 + 1];
      if (static_cast<uint32_t>(key + i / 2 * 8 - begin) >= static_cast<uint32_t>(count))
        weights[n][i] = 0.0f;
    }
  }
}

template <class T, int kHeadDim, bool kDropout, class Launch>
BU_KERNEL(128, 2)
attention_backward_keys_wgmma_kernel(BU_PARAMS Launch p) {
  constexpr bool kBias = kHasBias<Launch>;
  using Shared = WgmmaKeyGradientShared<kHeadDim>;
  const AttentionBlock block = uniform(attention_block<true>(p));
  const int first_key = block.tile * 64;
  if (first_key >= block.k_len) return;

  const int last_key = std::min(first_key + 64, block.k_len) - 1;
  const QueryWindows windows(p.args, block);
  const RowRange rows = windows.queries(first_key, last_key);
  const int query_tiles = (rows.end + 63) / 64;
  // The first tile from this one on with queries that see keys of the block.
  const auto needed = [&](int tile) {
    while (tile < query_tiles &&
           !windows.keys_of_any(windows.template span<64>(tile * 64)).meets(first_key, last_key))
      ++tile;
    return of_warp(tile);
  };
  const int first_tile = needed(rows.begin / 64);

  const auto copy_queries = [&](int head, int tile, int stage) {
    const uint32_t begin = keep_in_register(block.q_begin);
    const HeadRows<const T> q(p.args.q, begin, head), dout(p.args.dout, begin, head);
    const uint32_t to = Shared::stage(stage);
    copy_tiles<64, 128, kHeadDim, 64>(to, q, tile * 64, block.q_len);
    copy_tiles<64, 128, kHeadDim, 64>(to + Shared::kTile, dout, tile * 64, block.q_len);
  };
  WgmmaQueryValues<kHeadDim, Launch> values(p, block, windows);
  if (first_tile < query_tiles) {
    if constexpr (Shared::kStages == 2) {
      const HeadRows<const T> k(p.args.k, block.k_begin, block.kv_head),
          v(p.args.v, block.k_begin, block.kv_head);
      copy_tiles<64, 128, kHeadDim, 64>(Shared::kKeys, k, first_key, block.k_len);
      copy_tiles<64, 128, kHeadDim, 64>(Shared::kKeys + Shared::kTile, v, first_key, block.k_len);
    }
    copy_queries(block.head, first_tile, 0);
    values.start(block.head, first_tile, 0);
    values.finish(0);
  }
  copy_async_commit();

  AttentionDropout dropout(p.args.rng, p.args.keep_threshold,
                           block.sequence * p.args.heads + block.head, !kBias);
  for (uint32_t* x : {&dropout.key.k0, &dropout.key.k1, &dropout.key.offset}) *x = first_lane(*x);
  const uint32_t base = keep_in_register(shared_base());
  WgmmaBackwardKeys<T, kHeadDim, kDropout, kBias> keys;
  const int warp_key = first_key + static_cast<int>(threadIdx.x) / 32 * 16;
  if constexpr (keys.kShared) {
    keys.k = HeadOperand::at(base + Shared::kKeys);
    keys.v = HeadOperand::at(base + Shared::kKeys + Shared::kTile);
  } else {
    keys.load(p.args, block, warp_key);
  }
  keys.start(block, warp_key);
  using Bias = KeyBias<T, kBias, WgmmaQueryStarts, 64>;
  const RowRange seeing = windows.queries(keys.first, keys.first + 15);
  const auto finish = [&] {  // the products with q and dout
    wgmma_wait<0>();
    wgmma_fence_operand(keys.dk);
    wgmma_fence_operand(keys.dv);
  };
  const int heads_end = block.head + p.group;
  for (int head = block.head; kBias && head < heads_end; ++head)
    Bias(p, block, {}, head, keys.first, Shared::kBytes).zero();
  int count = 0;  // of query tiles so far, over all heads
  for (int head = block.head; first_tile < query_tiles && head < heads_end;
       ++head, ++dropout.stream) {
    int tile = first_tile, next = 0;
    do {
      next = needed(tile + 1);
      copy_async_wait<0>();
      fence_shared();
      sync_block();  // the tile is there for all, and all are done with the one that is replaced
      const bool same_head = next < query_tiles;
      const bool more = same_head || head + 1 < heads_end;
      if (more) {
        const int next_head = same_head ? head : head + 1;
        const int next_tile = same_head ? next : first_tile;
        copy_queries(next_head, next_tile, count + 1);
        values.start(next_head, next_tile, count + 1);
      }
      copy_async_commit();

      const PositionSpan span = windows.template span<64>(tile * 64);
      const bool hides = windows.bounded() && !windows.keys_of_all(span).holds(first_key, last_key);
      const uint32_t at = base + Shared::stage(count), known = Shared::values(count);
      AttentionBlock here = block;
      here.head = head;
      if constexpr (kBias)
        here =
            again(here, &AttentionBlock::head, &AttentionBlock::q_begin, &AttentionBlock::k_begin);
      const Bias bias(p, here, {known + Shared::kStarts}, here.head, keys.first, Shared::kBytes);
      keys.template add_queries<true>(
          HeadOperand::at(at), HeadOperand::at(at + Shared::kTile), known, known + Shared::kDelta,
          kBias ? 1.0f : p.unit, dropout, tile * 64,
          [&](float (&scores)[8][4]) { bias.add(scores, tile * 64, p.unit); },
          [&](float (&weights)[8][4]) {
            if (hides) zero_unseen(weights, keys.first, known + Shared::kSeen);
          },
          [](int, const auto&) {}, [&](const float (&gradients)[8][4]) { bias.put(gradients); });
      if constexpr (Shared::kStages == 2) finish();
      if (more) values.finish(count + 1);  // after the sums ptxas would spill registers
      bias.add_up(tile * 64, seeing, p.keep);
      tile = next;
      ++count;
    } while (tile < query_tiles);
  }
  if constexpr (Shared::kStages > 2) finish();
  keys.store(p.args, again(block, &AttentionBlock::kv_head, &AttentionBlock::k_begin), p.keep);
}

}  // namespace bert_unpad
