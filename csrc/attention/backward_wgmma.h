// The backward pass with wgmma (sm_90a), for head dim 64: the formulas of backward_kernel.h, fused
// as there. A block owns a whole head of a sequence. With a window, grouped heads, a position bias,
// long sequences or few heads backward_dq_wgmma.h and backward_keys_wgmma.h compute the same
// instead.
//
// A warpgroup owns 64 keys, a warp 16 of them. Rows of K and V stay in registers as A operands, and
// scores are computed transposed (keys x queries), so that weights and score gradients leave the
// tensor cores in the layout that the products with dout and Q need for their A operand. B operands
// are tiles of 64 queries in shared memory, of which the next is copied meanwhile. The score
// gradients also go to shared memory: dQ needs those of all keys of the pass. Each warpgroup
// computes its share of dQ's columns from a tile with these columns of K. Between passes the sums
// of dQ stay in shared memory in fp32.
#pragma once

#include "attention/dropout.h"
#include "attention/kernel_parts.h"
#include "attention/wgmma_parts.h"

namespace bert_unpad {

// Where things lie in shared memory.
template <int kGroups>
struct WgmmaBackwardShared {
  static constexpr int kKeys = 64 * kGroups;
  static constexpr uint32_t kTile = SharedTile<64>::bytes(64);
  // Two stages, each a tile of q and one of dout.
  static BU_HD uint32_t stage(int i) { return i % 2 * 2 * kTile; }
  // K, a tile of all keys for each warpgroup's columns.
  static constexpr uint32_t kKeyTiles = 4 * kTile;
  // Score gradients, [keys, 64 queries].
  static constexpr uint32_t kGradients = kKeyTiles + kGroups * kTile;
  // lse and delta of all queries.
  static constexpr uint32_t kRowValues = kGradients + kGroups * kTile;

  static BU_HD int rows(int max_q) { return (max_q + 63) / 64 * 64; }
  // Sums of dQ: a thread's own, 16 bytes beside those of its neighbours.
  static BU_HD uint32_t query_sums(int max_q) { return kRowValues + 8 * rows(max_q); }
  static BU_HD uint32_t bytes(int max_q, int max_k) {
    return query_sums(max_q) + (max_k > kKeys ? rows(max_q) * 64 * 4 : 0);
  }
};

// A warp's 16 keys: their rows, and the gradients that these have gathered. kBias: scores change,
// and whether there is dropout is only known when it runs.
template <class T, int kHeadDim, bool kDropout, bool kBias = false>
struct WgmmaBackwardKeys {
  // Rows of 128 columns stay in shared memory: there are no registers for them.
  static constexpr bool kShared = kHeadDim == 128;
  // There are no registers for the gradients of the weights beside scores.
  static constexpr bool kLate = kBias || (kShared && kDropout);
  int first, end;  // the first of the keys in the sequence, and the sequence's length
  std::conditional_t<kShared, HeadOperand, uint32_t[kHeadDim / 16][4]> k, v;
  HeadSums<kHeadDim> dk, dv;

  // Reads the rows of the keys from `first_key` on; those of the last keys are not needed any more.
  BU_DEVICE void load(const cuda::AttentionCudaParams& a, const AttentionBlock& block,
                      int first_key) {
    load_a<64>(k, HeadRows<const T>(a.k, block.k_begin, block.kv_head), first_key, block.k_len, 0);
    load_a<64>(v, HeadRows<const T>(a.v, block.k_begin, block.kv_head), first_key, block.k_len, 0);
  }

  // With the keys that were loaded.
  BU_DEVICE void start(const AttentionBlock& block, int first_key) {
    first = first_key;
    end = block.k_len;
    zero(dk);
    zero(dv);
    if constexpr (!kShared) {
      wgmma_fence_operand(k);
      wgmma_fence_operand(v);
    }
    wgmma_fence_operand(dk);
    wgmma_fence_operand(dv);
  }

  // Takes in a tile of queries, whose first is `first_query` in the sequence. `lse` and `delta`:
  // where theirs begin in shared memory; lse is in base 2 unless kNaturalLse, delta divided by the
  // scale of what dropout keeps, as the score gradients are. `change` is called with the scores,
  // [keys, queries], which are in units of `unit` afterwards; `hide` with the weights, and sets
  // those to 0 that do not count; `put` four times, with the number of a step of 16 queries and its
  // score gradients as an A operand; `share` with all of them, [keys, queries]. The products with q
  // and dout are still being made afterwards.
  template <bool kNaturalLse = false, class Change, class Hide, class Put, class Share>
  BU_DEVICE void add_queries(HeadOperand q, HeadOperand dout, uint32_t lse, uint32_t delta,
                             float unit, const AttentionDropout& dropout, int first_query,
                             const Change& change, const Hide& hide, const Put& put,
                             const Share& share) {
    float s[8][4], dp[8][4];  // [keys, queries]: scores; gradients of the weights
    wgmma_fence();
    multiply_heads<T, kHeadDim / 16>(s, k, q);
    wgmma_commit();
    const auto start_dp = [&] {
      wgmma_fence();
      multiply_heads<T, kHeadDim / 16>(dp, v, dout);
      wgmma_commit();
    };
    if constexpr (!kLate) start_dp();
    const uint32_t column = 8 * (threadIdx.x % 4);  // bytes from that of a tile's first query
    wgmma_wait<kLate ? 0 : 1>();
    wgmma_fence_operand(s);
    change(s);
    const bool draws = kDropout && (!kBias || dropout.draws());
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      FloatPair l = load_shared<FloatPair>(lse + column + 32 * n);
      if constexpr (kNaturalLse) l = {l.low * kLog2e, l.high * kLog2e};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[n][i] = exp2_approx(fma(s[n][i], unit, -(i % 2 ? l.high : l.low)));
    }
    hide(s);
    if constexpr (kLate) start_dp();
    // There are no registers to keep what follows from it.
    const int key = static_cast<int>(keep_in_register(first));
    wgmma_wait<0>();
    wgmma_fence_operand(dp);
    uint32_t operands[4][2][4];  // of 16 queries each: weights, score gradients
    const auto multiply = [&](int step) {
      wgmma_fence_operand(operands[step]);
      wgmma_fence();
      add_rows<T>(dv, operands[step][0], dout, step);
      add_rows<T>(dk, operands[step][1], q, step);
      wgmma_commit();
    };
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      float kept[2][4];  // weights that are not dropped
#pragma unroll
      for (int i = 0; i < 8; ++i) kept[i / 4][i % 4] = s[2 * step + i / 4][i % 4];
      if (draws) {
        const Philox4 bits = dropout.draw_transposed(first_query / 16 + step, key / 32);
        dropout.apply(kept, AttentionDropout::transposed_tile(bits, first / 16 % 2));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 2 * step + half;
        const FloatPair dots = load_shared<FloatPair>(delta + column + 32 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          dp[n][i] = score_gradient<kDropout>(s[n][i], kept[half][i], dp[n][i],
                                              i % 2 ? dots.high : dots.low);
        }
      }
      pack_a<T>(operands[step][0], kept[0], kept[1]);
      pack_a<T>(operands[step][1], dp[2 * step], dp[2 * step + 1]);
      put(step, operands[step][1]);
      // While the next ones are worked out; with a bias there are no registers for that.
      if constexpr (!kBias) multiply(step);
    }
    share(dp);
    if constexpr (kBias) {
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply(step);
    }
  }

  // Puts score gradients of 16 queries where the warpgroups that compute dQ find them, [keys of the
  // pass, 64 queries]. Those of rows beyond the last key may be infinite; they must not meet zeros.
  BU_DEVICE void put(const uint32_t (&gradients)[4], int step, uint32_t tile) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    // Held, so that it is one register outside of this function and not one for each piece.
    const uint32_t at = keep_in_register(tile + SharedTile<64>::offset(row, 0) + 4 * (lane % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool valid = first + lane / 4 + 8 * (i % 2) < end;
      store_shared<uint32_t>((at ^ 16 * (2 * step + i / 2)) + SharedTile<64>::bytes(8 * (i % 2)),
                             valid ? gradients[i] : 0u);
    }
  }

  BU_DEVICE void store(const cuda::AttentionCudaParams& a, const AttentionBlock& block,
                       float keep) const {
    const float unit = a.scale * keep;
    store_head_rows<T>(dk, unit, unit, HeadRows<T>(a.dk, block.k_begin, block.kv_head), first, end);
    store_head_rows<T>(dv, keep, keep, HeadRows<T>(a.dv, block.k_begin, block.kv_head), first, end);
  }
};

// lse in base 2 and delta = rowsum(dout * out) times `unit` of all queries of a head, into shared
// memory; zeros up to the last tile's end. A warp takes 16 rows at a time, 8 lanes each of them.
template <class T, int kWarps>
BU_DEVICE void fill_wgmma_row_values(const cuda::AttentionCudaParams& a,
                                     const AttentionBlock& block, uint32_t lse_at,
                                     uint32_t delta_at, float unit) {
  const int lane = threadIdx.x % 32, end = WgmmaBackwardShared<1>::rows(block.q_len);
  const float* lse = a.lse + block.head * a.q_tokens + block.q_begin;
  const HeadRows<const T> dout(a.dout, block.q_begin, block.head);
  const HeadRows<const T> out(a.out, block.q_begin, block.head);
  for (int first = threadIdx.x / 32 * 16; first < end; first += 16 * kWarps) {
    Vector<uint32_t, 4> x[4] = {}, y[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + 4 * i + lane / 8, column = lane % 8 * 8;
      if (row >= block.q_len) continue;
      x[i] = load_global<Vector<uint32_t, 4>>(dout.at(row, column));
      y[i] = load_global<Vector<uint32_t, 4>>(out.at(row, column));
    }
    const int row = first + lane % 16;
    const float l = row < block.q_len ? load_global<float>(lse + row) * kLog2e : 0.0f;
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float dot = 0.0f;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const FloatPair p = unpack<T>(x[i].v[n]), q = unpack<T>(y[i].v[n]);
        dot = fma(p.low, q.low, fma(p.high, q.high, dot));
      }
      dot = quad_sum(dot);
      dot += shuffle_xor(dot, 4);
      if (lane % 8 == i) mine = dot;
    }
    if (lane < 16) store_shared<float>(lse_at + 4 * row, l);
    if (lane % 8 < 4)
      store_shared<float>(delta_at + 4 * (first + lane % 8 * 4 + lane / 8), mine * unit);
  }
}

template <class T, int kGroups, bool kDropout>
BU_KERNEL(128 * kGroups, 2 / kGroups)
attention_backward_wgmma_kernel(BU_PARAMS AttentionLaunch p) {
  using Shared = WgmmaBackwardShared<kGroups>;
  constexpr int kThreads = 128 * kGroups, kKeys = Shared::kKeys, kColumns = 64 / kGroups;
  const AttentionBlock block = uniform(attention_block(p));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = threadIdx.x / 128;
  const uint32_t lse_at = Shared::kRowValues;
  const uint32_t delta_at = lse_at + 4 * Shared::rows(p.args.max_q);
  const uint32_t sums_at =
      Shared::query_sums(p.args.max_q) + warp * (kColumns / 8) * 512 + lane * 16;
  const int passes = (block.k_len + kKeys - 1) / kKeys;
  const int query_tiles = (block.q_len + 63) / 64;

  const HeadRows<const T> q(p.args.q, block.q_begin, block.head);
  const HeadRows<const T> dout(p.args.dout, block.q_begin, block.head);
  const auto copy_queries = [&](int tile, int stage) {
    const uint32_t to = Shared::stage(stage);
    copy_tile<64, kThreads, 64>(to, q, tile * 64, block.q_len);
    copy_tile<64, kThreads, 64>(to + Shared::kTile, dout, tile * 64, block.q_len);
  };
  if (passes > 0 && query_tiles > 0) copy_queries(0, 0);
  copy_async_commit();
  WgmmaBackwardKeys<T, 64, kDropout> keys;
  keys.load(p.args, block, 16 * warp);
  fill_wgmma_row_values<T, 4 * kGroups>(p.args, block, lse_at, delta_at,
                                        keep_rate(p.args.keep_threshold));

  AttentionDropout dropout(p.args.rng, p.args.keep_threshold,
                           block.sequence * p.args.heads + block.head);
  // Uniform registers for the keys of all rounds: there are no others left.
  for (uint32_t* x : {&dropout.key.k0, &dropout.key.k1, &dropout.key.offset}) *x = first_lane(*x);
  const uint32_t base = keep_in_register(shared_base());
  const auto gradients = TileOperand<64>::at(base + Shared::kGradients);
  const auto key_columns = TileOperand<kColumns>::at(base + Shared::kKeyTiles +
                                                     group * SharedTile<kColumns>::bytes(kKeys));
  const auto keys_again = [&] {
    return again(block, &AttentionBlock::kv_head, &AttentionBlock::k_begin);
  };
  int count = 0;  // of query tiles so far, over all passes
  for (int pass = 0; pass < passes; ++pass) {
    const int pass_key = pass * kKeys;
    keys.start(block, pass_key + 16 * warp);
    for (int tile = 0; tile < query_tiles; ++tile, ++count) {
      copy_async_wait<0>();
      fence_shared();
      sync_block();  // the tile is there for all, and all are done with the one before it
      if (tile == 0) {
        HeadRows<const T> k(p.args.k, block.k_begin, block.kv_head);
#pragma unroll
        for (int i = 0; i < kGroups; ++i, k.p += kColumns)
          copy_tile<kKeys, kThreads, kColumns>(
              Shared::kKeyTiles + i * SharedTile<kColumns>::bytes(kKeys), k, pass_key, block.k_len);
        copy_async_commit();
      }
      const bool same_pass = tile + 1 < query_tiles;
      if (same_pass || pass + 1 < passes) copy_queries(same_pass ? tile + 1 : 0, count + 1);
      copy_async_commit();

      const uint32_t at = base + Shared::stage(count);
      keys.add_queries(
          HeadOperand::at(at), HeadOperand::at(at + Shared::kTile), lse_at + 256 * tile,
          delta_at + 256 * tile, p.unit, dropout, tile * 64, [](const auto&) {}, [](const auto&) {},
          [&](int step, const auto& gradients) { keys.put(gradients, step, Shared::kGradients); },
          [](const auto&) {});
      float dq[kColumns / 8][4];
      const uint32_t mine = sums_at + tile * 64 * 256;
      if (pass > 0) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const auto x = load_shared<Vector<float, 4>>(mine + 512 * n);
#pragma unroll
          for (int i = 0; i < 4; ++i) dq[n][i] = x.v[i];
        }
        wgmma_fence_operand(dq);
      }
      // The keys have landed after their first tile; the next queries may be on their way.
      copy_async_wait<1>();
      fence_shared();
      sync_block();  // all score gradients of the tile are there
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4 * kGroups; ++step) {
        wgmma<T, true, true>(dq, gradients.template step<true>(step),
                             key_columns.template step<true>(step), pass > 0 || step > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();  // also for the products of add_queries
      wgmma_fence_operand(dq);
      wgmma_fence_operand(keys.dk);
      wgmma_fence_operand(keys.dv);
      if (!same_pass && pass + 1 < passes)
        keys.load(p.args, keys_again(), pass_key + kKeys + 16 * warp);
      if (pass + 1 == passes) {
        const float unit = p.args.scale * p.keep;
        store_rows<T>(dq, unit, unit, HeadRows<T>(p.args.dq, block.q_begin, block.head),
                      tile * 64 + warp % 4 * 16, block.q_len, kColumns * group);
      } else {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n)
          store_shared<Vector<float, 4>>(mine + 512 * n, {dq[n][0], dq[n][1], dq[n][2], dq[n][3]});
      }
    }
    keys.store(p.args, keys_again(), p.keep);
  }
  if (passes > 0) return;
  const float zeros[8][4] = {};
  for (int row = 16 * warp; row < block.q_len; row += 64 * kGroups)
    store_rows<T>(zeros, 1.0f, 1.0f, HeadRows<T>(p.args.dq, block.q_begin, block.head), row,
                  block.q_len, 0);
}

}  // namespace bert_unpad
