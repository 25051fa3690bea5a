// The forward pass with wgmma (sm_90a), for head dims 64 and 128: the formulas of forward_kernel.h.
//
// A block of one or two warpgroups takes 64 queries of one head for each, a warp 16 of them, whose
// rows of q stay in registers as A operands. Keys and values come in tiles of 64. A tile's scores
// leave the tensor cores in the layout that the product with the values needs for its A operand.
// That product is not waited for before the next tile's scores are begun: one wait serves both. So
// a tile's values are still read when the next tile is taken in, and its stage is free one tile
// later than its keys are.
//
// At 128 registers a thread, four warpgroups share an SM: while one computes exponentials, the
// others multiply. With 128 columns there are two. Where they are of one block, the second one is
// half a tile behind: its barrier stands after its scores, so it multiplies while the first one
// computes exponentials, and the other way round.
//
// A launch with a position bias takes the kernel for windows.
#pragma once

#include "attention/dropout.h"
#include "attention/kernel_parts.h"
#include "attention/query_windows.h"
#include "attention/score_bias.h"
#include "attention/wgmma_parts.h"

namespace bert_unpad {

// Stages of keys and values: of a tile whose values are read, of the one that is taken in, and of
// those that are on their way.
template <int kGroups>
inline constexpr int kWgmmaStages = kGroups == 1 ? 3 : 4;

template <class T, int kHeadDim, int kGroups>
using WgmmaKeys =
    KeyTiles<T, kHeadDim, 4 * kGroups, kWgmmaStages<kGroups>, kWgmmaStages<kGroups>, 64, 64>;

// A warp's 16 queries and what they have summed so far.
template <class T, int kHeadDim, bool kDropout, bool kWindow, bool kBias>
struct WgmmaRows {
  uint32_t q[kHeadDim / 16][4];
  HeadSums<kHeadDim> o;
  // Of rows g and g + 8: the largest score so far, before scaling, with a bias in base 2; the sum
  // of the exponentials in this lane's columns; with a window the keys that they see.
  float row_max[2], sum[2];
  RowRange seen[2];

  // Takes in a tile of keys and values, the operands. Its product with the values is still being
  // made afterwards. `to`: keys of the tile before the sequence's end, 64 or more if all; `hides`:
  // not all rows see all of its keys. `first_row`, `first_key`: in the sequence. `scored` is called
  // when the scores are there.
  template <class Scored>
  BU_DEVICE void add_tile(HeadOperand k, HeadOperand v, int to, bool hides, float scale,
                          const AttentionDropout& dropout, int first_row, int first_key,
                          const QueryBias<T, kBias>& bias, const Scored& scored) {
    float s[8][4];
    wgmma_fence();
    multiply_heads<T>(s, q, k);
    wgmma_commit();
    wgmma_wait<0>();  // also for the last tile's product with the values
    wgmma_fence_operand(s);
    wgmma_fence_operand(o);
    scored();
    bias.add(s, first_key, scale);
    if constexpr (kWindow) {
      if (hides) replace_unseen(s, seen, first_key, -INFINITY);
    } else if (to < 64) {
      mask(s, to);
    }
    softmax(s, kBias ? 1.0f : scale);
    const bool draws = kDropout && (!kBias || dropout.draws());
    uint32_t weights[4][4];
    Philox4 bits;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      pack_a<T>(weights[step], s[2 * step], s[2 * step + 1]);
      if (draws) {
        if (step % 2 == 0) bits = dropout.draw(first_row / 16, first_key / 32 + step / 2);
        dropout.apply(weights[step], AttentionDropout::tile(bits, step % 2));
      }
    }
    wgmma_fence_operand(weights);
    wgmma_fence_operand(o);
    wgmma_fence();
    add_rows<T>(o, weights, v);
    wgmma_commit();
  }

 private:
  // Of keys from `to` on, which no row sees.
  BU_DEVICE void mask(float (&s)[8][4], int to) const {
    const int column = 2 * static_cast<int>(threadIdx.x % 4);
    const int count = to > column ? to - column : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (static_cast<uint32_t>(8 * n + i) >= static_cast<uint32_t>(count))
            s[n][2 * half + i] = -INFINITY;
      }
    }
  }

  // Turns scores, in units of `unit`, into exponentials relative to the largest score so far, and
  // rescales what was summed relative to an older one.
  BU_DEVICE void softmax(float (&s)[8][4], float unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = row_max[half];
#pragma unroll
      for (int n = 0; n < 8; ++n) most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      most = quad_max(most);
      // A row that has seen no key yet has no largest score.
      const float base = kWindow && most == -INFINITY ? 0.0f : most;
      const float rescale = exp2_approx((row_max[half] - base) * unit);
      const float offset = base * unit;
      row_max[half] = most;
      float total = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[n][i] = exp2_approx(fma(s[n][i], unit, -offset));
          total += s[n][i];
        }
      }
      sum[half] = fma(sum[half], rescale, total);
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        o[n / 8][n % 8][2 * half] *= rescale;
        o[n / 8][n % 8][2 * half + 1] *= rescale;
      }
    }
  }
};

// Warpgroups on an SM that registers have to allow.
template <int kHeadDim, bool kWindow>
inline constexpr int kWgmmaResident = kHeadDim == 128 ? 2
                                      : kWindow       ? 3
                                                      : 4;

template <class T, int kHeadDim, int kGroups, bool kDropout, bool kWindow, class Launch>
BU_KERNEL(128 * kGroups, (kWgmmaResident<kHeadDim, kWindow> / kGroups))
attention_forward_wgmma_kernel(BU_PARAMS Launch p) {
  constexpr bool kBias = kHasBias<Launch>;
  static_assert(kWindow || !kBias);
  static_assert(!kWindow || kGroups == 1, "its warpgroups would see other keys");
  const AttentionBlock block = attention_block(p);
  const int block_row = block.tile * 64 * kGroups;
  if (block_row >= block.q_len) return;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = block_row + warp * 16;
  WgmmaRows<T, kHeadDim, kDropout, kWindow, kBias> rows;
  RowRange any{0, block.k_len}, all = any;  // keys that any query sees, and that all see
  const QueryWindows windows(p.args, block);
  if constexpr (kWindow) {
    const PositionSpan span = windows.template span<64>(block_row);
    any = windows.keys_of_any(span);
    all = windows.keys_of_all(span);
    for (int half = 0; half < 2; ++half)
      rows.seen[half] = windows.keys(first_row + lane / 4 + 8 * half);
  }
  const WgmmaKeys<T, kHeadDim, kGroups> keys(p.args, block, any.end);
  constexpr int kAhead = kWgmmaStages<kGroups> - 2;
  const int first_tile = any.begin / keys.kKeys;
  for (int ahead = 0; ahead < kAhead; ++ahead) keys.start(first_tile + ahead);

  // The maximum is taken before scores are scaled, so the scale must be positive: q gets its sign.
  const float scale = fabsf(p.unit);
  load_a<kHeadDim>(rows.q, HeadRows<const T>(p.args.q, block.q_begin, block.head), first_row,
                   block.q_len, p.args.scale < 0.0f ? kNegatePair : 0u);
  zero(rows.o);
  rows.row_max[0] = rows.row_max[1] = -INFINITY;
  rows.sum[0] = rows.sum[1] = 0.0f;
  const AttentionDropout dropout(p.args.rng, p.args.keep_threshold,
                                 block.sequence * p.args.heads + block.head, !kBias);
  const QueryBias<T, kBias> bias(p, block, windows, first_row);

  const uint32_t base = keep_in_register(shared_base());
  const auto wait_for = [&](int tile) {
    copy_async_wait<kAhead - 1>();
    fence_shared();
    sync_block();  // the tile is there for all, and all are done with the one before the last
    keys.start(tile + kAhead);
  };
  if (kGroups == 2 &&
      block_row + 64 * static_cast<int>(first_lane(threadIdx.x / 128)) >= block.q_len) {
    for (int tile = first_tile; tile < keys.tiles(); ++tile)
      wait_for(tile);  // copies for the other one
    return;
  }
  wgmma_fence_operand(rows.q);
  wgmma_fence_operand(rows.o);
  const bool behind = kHeadDim == 128 && kGroups == 2 && first_lane(threadIdx.x / 128) == 1;
  for (int tile = first_tile; tile < keys.tiles(); ++tile) {
    if (!behind || tile == first_tile) wait_for(tile);
    const int first_key = tile * keys.kKeys;
    rows.add_tile(HeadOperand::at(base + keys.keys(tile)),
                  HeadOperand::at(base + keys.values(tile)), block.k_len - first_key,
                  !all.holds(first_key, first_key + keys.kKeys - 1), scale, dropout, first_row,
                  first_key, bias, [&] {
                    if (behind && tile + 1 < keys.tiles()) wait_for(tile + 1);
                  });
  }
  wgmma_wait<0>();
  wgmma_fence_operand(rows.o);

  const HeadRows<T> out(p.args.out_w, block.q_begin, block.head);
  float* lse = p.args.lse + block.head * p.args.q_tokens + block.q_begin;
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = quad_sum(rows.sum[half]);
    // 0 without keys; a NaN stays one. No division: it is a function, and with a call in the kernel
    // ptxas waits for every wgmma at once.
    factor[half] = total > 0.0f ? p.keep * reciprocal_approx(total) : total;
    const int row = first_row + 8 * half + lane / 4;
    if (lane % 4 == 0 && row < block.q_len)
      store_global<float>(lse + row,
                          fma(rows.row_max[half], kBias ? 1.0f : scale, log2f(total)) * kLn2);
  }
  store_head_rows<T>(rows.o, factor[0], factor[1], out, first_row, block.q_len);
}

}  // namespace bert_unpad
