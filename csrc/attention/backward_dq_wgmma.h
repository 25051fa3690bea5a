// dQ with wgmma (sm_90a), for head dims 64 and 128, where the backward pass is not fused: what
// backward_dq_kernel.h computes, by the same formulas. It also writes delta, which
// backward_keys_wgmma.h reads afterwards.
//
// As in the forward pass a block of one warpgroup takes 64 queries of one head, a warp 16 of them.
// Their rows of q stay in registers as A operands; those of dout, for which there are no registers,
// in shared memory. Keys and values come in tiles of 64, those that one of the queries sees. Score
// gradients leave the tensor cores in the layout that the product with the keys needs for its A
// operand. That product is waited for together with the next tile's scores, so a tile's keys stay
// in shared memory for one tile longer than its values. Meanwhile the score gradients are added to
// the sums of a position bias.
#pragma once

#include "attention/dropout.h"
#include "attention/kernel_parts.h"
#include "attention/query_windows.h"
#include "attention/table_bias.h"
#include "attention/wgmma_parts.h"

namespace bert_unpad {

template <class T, int kHeadDim>
using WgmmaQueryGradientKeys = KeyTiles<T, kHeadDim, 4, 3, 2, 64, 64>;

// Where things lie in shared memory: tiles of keys and values, then the queries' tile of dout; with
// a position bias score gradients, strips, a table and sums.
template <class T, int kHeadDim>
struct WgmmaQueryGradientShared {
  static constexpr uint32_t kDout = WgmmaQueryGradientKeys<T, kHeadDim>::kSharedBytes;
  static constexpr uint32_t kBytes = kDout + SharedTile<kHeadDim>::bytes(64);
  static constexpr uint32_t kStrips = kBytes + 4 * GradientTile<64>::kBytes;
  static constexpr uint32_t kTable = kStrips + 4 * DistanceStrip<true, 64>::kBytes;
  static constexpr uint32_t kSums = kTable + DistanceStrip<true, 64>::kTableBytes;
  static constexpr uint32_t kBiasBytes = kSums + TableSums<true, 64>::kBytes;
};

// A warp's 16 queries and their gradients so far.
template <class T, int kHeadDim, bool kDropout, bool kBias>
struct WgmmaQueryGradients {
  uint32_t q[kHeadDim / 16][4];
  HeadSums<kHeadDim> dq;
  // Of rows g and g + 8: lse in base 2; delta, times the rate of what dropout keeps, as the score
  // gradients are; the keys that they see.
  float lse[2], delta[2];
  RowRange seen[2];

  // Loads the rows from `first_row` on, and writes their delta. `rate`: of what dropout keeps.
  BU_DEVICE void start(const cuda::AttentionCudaParams& a, const AttentionBlock& block,
                       const QueryWindows& windows, int first_row, float rate) {
    const int lane = threadIdx.x % 32, end = block.q_len;
    load_a<kHeadDim>(q, HeadRows<const T>(a.q, block.q_begin, block.head), first_row, end, 0);
    uint32_t dout[kHeadDim / 16][4];
    load_a<kHeadDim>(dout, HeadRows<const T>(a.dout, block.q_begin, block.head), first_row, end, 0);
    row_dots<kHeadDim>(delta, dout, HeadRows<const T>(a.out, block.q_begin, block.head), first_row,
                       end);
    const int64_t head = block.head * a.q_tokens + block.q_begin;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + lane / 4 + 8 * half;
      // Weights of rows beyond the last one are zeros, whatever their bias.
      lse[half] = row < end ? load_global<float>(a.lse + head + row) * kLog2e
                  : kBias   ? INFINITY
                            : 0.0f;
      delta[half] *= rate;
      seen[half] = windows.keys(row);
      if (row < end && lane % 4 == 0) store_global<float>(a.delta + head + row, delta[half]);
    }
    zero(dq);
    wgmma_fence_operand(q);
    wgmma_fence_operand(dq);
  }

  // Takes in a tile of keys and values. `dout`, `k`, `v`: operands. Its product with the keys is
  // still being made afterwards. `hides`: not all rows see all of its keys. `first_row`,
  // `first_key`: in the sequence.
  BU_DEVICE void add_tile(HeadOperand dout, HeadOperand k, HeadOperand v, bool hides, float scale,
                          const AttentionDropout& dropout, int first_row, int first_key,
                          const QueryBias<T, kBias>& bias, const DistanceStrip<kBias, 64>& strip,
                          const QueryBiasSums<T, kBias, 64>& sums) {
    float s[8][4], dp[8][4];  // scores; gradients of the weights
    wgmma_fence();
    multiply_heads<T>(s, q, k);
    wgmma_commit();
    // Also for the last tile's product with the keys: there are no registers for its operands
    // beside the second product's sums.
    wgmma_wait<0>();
    wgmma_fence_operand(s);
    const int lane = threadIdx.x % 32;
    if (strip.used())  // before there are sums of the second product
      strip.template add<1>(s, scale, 2 * (lane % 4) - lane / 4 + 15);
    else
      bias.add(s, first_key, scale);
    wgmma_fence();
    multiply_heads<T, kHeadDim / 16>(dp, dout, v);
    wgmma_commit();
    const float unit = kBias ? 1.0f : scale;  // of a score, once it has its bias
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float& weight = s[i / 4][i % 4];
      weight = exp2_approx(fma(weight, unit, -lse[i / 2 % 2]));
    }
    // Weights, not scores: those of a row that sees no key are infinite here.
    if (hides) replace_unseen(s, seen, first_key, 0.0f);
    wgmma_wait<0>();
    wgmma_fence_operand(dp);
    const bool draws = kDropout && (!kBias || dropout.draws());
    uint32_t gradient[4][4];
    Philox4 bits;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (draws) {
        if (step % 2 == 0) bits = dropout.draw(first_row / 16, first_key / 32 + step / 2);
        drop(dp[2 * step], dp[2 * step + 1], dropout.rule, AttentionDropout::tile(bits, step % 2));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = dp[2 * step + i / 4][i % 4];
        x = s[2 * step + i / 4][i % 4] * (x - delta[i / 2 % 2]);
      }
      pack_a<T>(gradient[step], dp[2 * step], dp[2 * step + 1]);
    }
    sums.put(dp);
    wgmma_fence_operand(gradient);
    wgmma_fence();
    add_rows<T>(dq, gradient, k);
    wgmma_commit();
  }

 private:
  // Zeroes what is dropped of two C tiles.
  static BU_DEVICE void drop(float (&left)[4], float (&right)[4], const PairRule& rule,
                             const DropoutTile& drawn) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rule.apply(left[2 * half], left[2 * half + 1], drawn.pair[0][half]);
      rule.apply(right[2 * half], right[2 * half + 1], drawn.pair[1][half]);
    }
  }
};

template <class T, int kHeadDim, bool kDropout, class Launch>
BU_KERNEL(128, (kHeadDim == 128 || kHasBias<Launch> ? 2 : 3))
attention_backward_dq_wgmma_kernel(BU_PARAMS Launch p) {
  constexpr bool kBias = kHasBias<Launch>;
  using Shared = WgmmaQueryGradientShared<T, kHeadDim>;
  const AttentionBlock block = attention_block(p);
  const int block_row = block.tile * 64;
  if (block_row >= block.q_len) return;

  const int first_row = block_row + static_cast<int>(threadIdx.x) / 32 * 16;
  const QueryWindows windows(p.args, block);
  const PositionSpan span = windows.template span<64>(block_row);
  // Keys that any query sees, and that all see.
  const RowRange any = windows.keys_of_any(span), all = windows.keys_of_all(span);
  const WgmmaQueryGradientKeys<T, kHeadDim> keys(p.args, block, any.end);
  const int first_tile = any.begin / keys.kKeys;
  if (first_tile < keys.tiles())
    copy_tiles<64, 128, kHeadDim, 64>(Shared::kDout,
                                      HeadRows<const T>(p.args.dout, block.q_begin, block.head),
                                      block_row, block.q_len);
  keys.start(first_tile);

  WgmmaQueryGradients<T, kHeadDim, kDropout, kBias> rows;
  rows.start(p.args, block, windows, first_row, keep_rate(p.args.keep_threshold));
  const AttentionDropout dropout(p.args.rng, p.args.keep_threshold,
                                 block.sequence * p.args.heads + block.head, !kBias);
  const QueryBias<T, kBias> bias(p, block, windows, first_row);
  const QueryBiasSums<T, kBias, 64> sums(p, block, windows, first_row, Shared::kBytes);
  const DistanceStrip<kBias, 64> strip(p, Shared::kStrips, Shared::kTable);
  TableSums<kBias, 64> table(p, Shared::kBytes, Shared::kSums);
  sums.zero();
  if (strip.used()) strip.load(block.head, threadIdx.x, 128);
  if (table.used()) table.clear();
  // From the warp's last row to key 0, where it matters.
  const int distance = block.q_len - block.k_len - first_row - 15;
  RowRange seen = any;  // by the warp's queries
  if constexpr (kBias) seen = windows.keys_of_any(windows.template span<16>(first_row));
  const uint32_t base = keep_in_register(shared_base());
  const auto dout = HeadOperand::at(base + Shared::kDout);
  for (int tile = first_tile; tile < keys.tiles(); ++tile) {
    copy_async_wait<0>();
    fence_shared();
    // The tile is there for all; all are done with the last values and the keys before the last.
    sync_block();
    keys.start(tile + 1);
    const int first_key = tile * keys.kKeys;
    if (strip.used()) {
      strip.fill(distance + first_key);
      sync_warp();
    }
    rows.add_tile(dout, HeadOperand::at(base + keys.keys(tile)),
                  HeadOperand::at(base + keys.values(tile)),
                  !all.holds(first_key, first_key + keys.kKeys - 1), p.unit, dropout, first_row,
                  first_key, bias, strip, sums);
    if (table.used())
      table.add(distance + first_key);
    else
      sums.add_up(first_key, seen, p.keep);
  }
  wgmma_wait<0>();
  wgmma_fence_operand(rows.dq);
  if (table.used() && first_tile < keys.tiles())  // else the sums are zeros already
    table.write(block.q_begin + block_row, block.head, p.keep, Shared::kDout);
  const float unit = p.args.scale * p.keep;
  store_head_rows<T>(rows.dq, unit, unit, HeadRows<T>(p.args.dq, block.q_begin, block.head),
                     first_row, again(block, &AttentionBlock::q_len).q_len);
}

}  // namespace bert_unpad
