// dQ on tensor cores, for sequences whose dQ does not fit into shared memory. As in the forward
// pass, each block owns 64 queries, passes over all keys and computes their scores again. It also
// writes delta, which the kernel for dK and dV reads afterwards.
#pragma once

#include "attention/dropout.h"
#include "attention/kernel_parts.h"
#include "attention/query_windows.h"
#include "attention/table_bias.h"

namespace bert_unpad {

inline constexpr int kQueryGradientWarps = 4;

// Of 128 columns in tiles of 32: with tiles of 64 there would be no room for a position bias in the
// 64 KiB that a block has on sm_75, nor for two blocks in the 100 KiB of sm_86, sm_89 and sm_120.
template <class T, int kHeadDim>
using QueryGradientKeys =
    KeyTiles<T, kHeadDim, kQueryGradientWarps, 2, 2, kHeadDim == 128 ? 32 : 64>;

// What a position bias has in shared memory after the tiles: gradients, strips, a table and sums.
// With 128 columns there are no registers for the last three.
template <class T, int kHeadDim>
struct QueryGradientBias {
  static constexpr bool kByDistance = kHeadDim < 128;
  using Strip = DistanceStrip<kByDistance, QueryGradientKeys<T, kHeadDim>::kKeys>;
  static constexpr uint32_t kGradients = QueryGradientKeys<T, kHeadDim>::kSharedBytes;
  static constexpr uint32_t kStrips = kGradients + kQueryGradientWarps * GradientTile<16>::kBytes;
  static constexpr uint32_t kTable = kStrips + kQueryGradientWarps * Strip::kBytes;
  static constexpr uint32_t kSums = kTable + Strip::kTableBytes;
  static constexpr uint32_t kBytes = kSums + TableSums<kByDistance>::kBytes;
};

// Three blocks on an SM for head dim 32: unasked, ptxas takes two registers too many for that with
// a position bias on sm_90.
template <class T, int kHeadDim, bool kDropout, bool kWindow, class Launch>
BU_KERNEL(32 * kQueryGradientWarps, (kHeadDim == 32 ? 3 : 2))
attention_backward_dq_kernel(BU_PARAMS Launch p) {
  constexpr bool kBias = kHasBias<Launch>;
  if constexpr (kNoProducts<T>) leave_out();
  const AttentionBlock block = attention_block(p);
  const int block_row = block.tile * 16 * kQueryGradientWarps;
  if (block_row >= block.q_len) return;

  const int lane = threadIdx.x % 32, first_row = block_row + threadIdx.x / 32 * 16;
  RowRange block_keys{0, block.k_len}, any = block_keys;
  [[maybe_unused]] RowRange seen[2];  // the keys that rows g and g + 8 see
  const QueryWindows windows(p.args, block);
  if constexpr (kWindow) {
    block_keys = windows.keys_of_any(windows.template span<16 * kQueryGradientWarps>(block_row));
    any = windows.keys_of_any(windows.template span<16>(first_row));
    for (int half = 0; half < 2; ++half) seen[half] = windows.keys(first_row + lane / 4 + 8 * half);
  }
  const QueryGradientKeys<T, kHeadDim> keys(p.args, block, block_keys.end);
  const int first_tile = block_keys.begin / keys.kKeys;
  keys.start(first_tile);

  const float scale = fabsf(p.unit);
  uint32_t q[kHeadDim / 16][4], dout[kHeadDim / 16][4];
  load_a<kHeadDim>(q, HeadRows<const T>(p.args.q, block.q_begin, block.head), first_row,
                   block.q_len, p.args.scale < 0.0f ? kNegatePair : 0u);
  load_a<kHeadDim>(dout, HeadRows<const T>(p.args.dout, block.q_begin, block.head), first_row,
                   block.q_len, 0);
  float delta[2], offset[2];  // of rows g and g + 8; offset: lse in units of log 2
  {
    const HeadRows<const T> out(p.args.out, block.q_begin, block.head);
    row_dots<kHeadDim>(delta, dout, out, first_row, block.q_len);
    const int64_t head = block.head * p.args.q_tokens + block.q_begin;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + lane / 4 + 8 * half;
      const bool valid = row < block.q_len;
      // Weights of rows beyond the last one are zeros, whatever their bias.
      offset[half] = valid   ? load_global<float>(p.args.lse + head + row) * kLog2e
                     : kBias ? INFINITY
                             : 0.0f;
      delta[half] *= keep_rate(p.args.keep_threshold);
      if (valid && lane % 4 == 0) store_global<float>(p.args.delta + head + row, delta[half]);
    }
  }
  [[maybe_unused]] const AttentionDropout dropout(
      p.args.rng, p.args.keep_threshold, block.sequence * p.args.heads + block.head, !kBias);
  const Operands<kHeadDim> operands;
  const QueryBias<T, kBias> bias(p, block, windows, first_row);
  const QueryBiasSums<T, kBias> sums(p, block, windows, first_row, keys.kSharedBytes);
  using Shared = QueryGradientBias<T, kHeadDim>;
  constexpr bool kByDistance = kBias && Shared::kByDistance;
  const DistanceStrip<kByDistance, keys.kKeys> strip(p, Shared::kStrips, Shared::kTable);
  TableSums<kByDistance> table(p, Shared::kGradients, Shared::kSums);
  sums.zero();
  if (strip.used()) strip.load(block.head, threadIdx.x, 32 * kQueryGradientWarps);
  if (table.used()) table.clear();
  // From the warp's last row to key 0, where it matters.
  const int distance = block.q_len - block.k_len - first_row - 15;
  const float unit = kBias ? 1.0f : scale;  // of a score, once it has its bias
  float dq[kHeadDim / 8][4] = {};

  for (int tile = first_tile; tile < keys.tiles(); ++tile) {
    copy_async_wait<0>();
    sync_block();  // the tile is there for all, and all are done with the one before it
    keys.start(tile + 1);
    if (first_row >= block.q_len) continue;
    if (strip.used()) {
      strip.fill(distance + tile * keys.kKeys);
      sync_warp();
    }
    const uint32_t k_tile = keys.keys(tile), v_tile = keys.values(tile);
#pragma unroll 1
    for (int step = 0; step < keys.kKeys / 16; ++step) {
      const int first_key = tile * keys.kKeys + 16 * step;
      if (first_key >= any.end) break;
      if (kWindow && first_key + 16 <= any.begin) continue;
      float s[2][4] = {}, dp[2][4] = {};
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) {
        uint32_t b[4];
        operands.b(b, k_tile, 16 * step, d);
        mma<T>(s[0], q[d], b[0], b[1]);
        mma<T>(s[1], q[d], b[2], b[3]);
        operands.b(b, v_tile, 16 * step, d);
        mma<T>(dp[0], dout[d], b[0], b[1]);
        mma<T>(dp[1], dout[d], b[2], b[3]);
      }
      if (strip.used())
        strip.template add<1>(s, scale, 16 * step + 2 * (lane % 4) - lane / 4 + 15);
      else
        bias.add(s, first_key, scale);
      if constexpr (kDropout) {
        if (!kBias || dropout.draws())
          dropout.apply(dp, dropout.tile(dropout.draw(first_row / 16, first_key / 32),
                                         first_key / 16 % 2 != 0));
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float weight = exp2_approx(fma(s[n][i], unit, -offset[i / 2]));
          const int key = first_key + 8 * n + 2 * (lane % 4) + i % 2;
          if (kWindow ? !seen[i / 2].holds(key, key) : key >= block.k_len) weight = 0.0f;
          dp[n][i] = weight * (dp[n][i] - delta[i / 2]);
        }
      }
      sums.put(dp);
      if (table.used())
        table.add(distance + first_key);
      else
        sums.add_up(first_key, {first_key, first_key + 16}, p.keep);
      uint32_t gradients[4];
      pack_a<T>(gradients, dp[0], dp[1]);
#pragma unroll
      for (int n = 0; n < kHeadDim / 16; ++n) {
        uint32_t b[4];
        operands.b_transposed(b, k_tile, 16 * step, n);
        mma<T>(dq[2 * n], gradients, b[0], b[1]);
        mma<T>(dq[2 * n + 1], gradients, b[2], b[3]);
      }
    }
  }
  if (table.used() && first_tile < keys.tiles())  // else the sums are zeros already
    table.write(block.q_begin + block_row, block.head, p.keep, 0);
  if (first_row >= block.q_len) return;
  const float factor = p.args.scale * p.keep;
  store_rows<T>(dq, factor, factor, HeadRows<T>(p.args.dq, block.q_begin, block.head), first_row,
                block.q_len, 0);
}

}  // namespace bert_unpad
