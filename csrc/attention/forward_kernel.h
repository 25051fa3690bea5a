// The forward pass on tensor cores: dropout(softmax(q k^T * scale)) v, with an online softmax (Dao,
// "FlashAttention-2", 2023).
//
// A block of 4 warps takes 64 * kRowTiles queries of one head, a warp 16 * kRowTiles of them. Keys
// and values come in tiles of 64; the next tile is copied while the current one is used. With one
// row tile per warp, shared memory is the limit (128 bytes per clock); two halve what a warp reads
// per product. A row's result does not depend on kRowTiles.
//
// Up to 64 columns and without a window, the scores of the next 32 keys are computed beside the
// softmax of the last 32, because tensor cores and exponentials are different pipes (as Shah et
// al., "FlashAttention-3", arXiv:2407.08608, do on Hopper). Only the last 32 keys are masked, in
// separate code, so the loop has no condition on keys. Wider heads have no registers for that.
//
// kWindow: queries see the keys of a window. A block takes the tiles of keys that one of its
// queries sees, a warp of these the steps of 16 keys that one of its own sees. A tile that all rows
// of a warp see whole is computed without a condition; others have separate code that masks
// scores. A launch with a position bias takes the kernel for windows.
#pragma once

#include "attention/forward_rows.h"

namespace bert_unpad {

inline constexpr int kForwardWarps = 4;

// Whether scores are computed ahead. Keys of a tile are then used up before its values, so there is
// a third tile of values.
template <int kHeadDim, bool kWindow>
inline constexpr bool kScoresAhead = kHeadDim <= 64 && !kWindow;

// With a position bias there are no registers for the scores of 64 keys beside 128 columns.
template <class T, int kHeadDim, bool kWindow, bool kBias = false>
using ForwardKeys = KeyTiles<T, kHeadDim, kForwardWarps, 2, kScoresAhead<kHeadDim, kWindow> ? 3 : 2,
                             kBias && kHeadDim == 128 ? 32 : 64>;

// Blocks on an SM that registers have to allow. Shared memory allows two on sm_75; for three ptxas
// would spill registers on Blackwell.
template <int kHeadDim, bool kWindow>
inline constexpr int kForwardBlocks = kHeadDim == 64 && kWindow && !kTuring && !kBlackwell ? 3 : 2;

template <class T, int kHeadDim, int kRowTiles, bool kDropout, bool kWindow, class Launch>
BU_KERNEL(32 * kForwardWarps, (kForwardBlocks<kHeadDim, kWindow && !kHasBias<Launch>>))
attention_forward_kernel(BU_PARAMS Launch p) {
  constexpr bool kBias = kHasBias<Launch>;
  if constexpr (kNoProducts<T>) leave_out();
  const AttentionBlock block = uniform(attention_block(p));
  const int block_row = block.tile * kForwardWarps * 16 * kRowTiles;
  if (block_row >= block.q_len) return;

  const KeptBlock<> kept(block, ForwardKeys<T, kHeadDim, kWindow, kBias>::kSharedBytes);
  const int lane = threadIdx.x % 32;
  const auto first_row_of = [](const AttentionBlock& b) {
    return b.tile * kForwardWarps * 16 * kRowTiles + warp_number() * 16 * kRowTiles;
  };
  const int first_row = first_row_of(block);
  ForwardRows<T, kHeadDim, kRowTiles, kDropout, kWindow, kBias> rows;
  RowRange block_keys{0, block.k_len}, any = block_keys, all = block_keys;
  const QueryWindows windows(p.args, block);
  if constexpr (kWindow) {
    block_keys = windows.keys_of_any(windows.template span<16 * kForwardWarps>(block_row));
    const PositionSpan span = windows.template span<16>(first_row);
    any = windows.keys_of_any(span);
    all = windows.keys_of_all(span);
    for (int half = 0; half < 2; ++half)
      rows.seen[half] = windows.keys(first_row + lane / 4 + 8 * half);
  }
  const ForwardKeys<T, kHeadDim, kWindow, kBias> keys(p.args, block, block_keys.end);
  const int first_tile = block_keys.begin / keys.kKeys;
  keys.start(first_tile);

  const HeadRows<const T> q(p.args.q, block.q_begin, block.head);
  // The maximum is taken before scores are scaled, so the scale must be positive: q gets its sign.
  const float scale = fabsf(p.args.scale) * kLog2e;
  const uint32_t flip = p.args.scale < 0.0f ? kNegatePair : 0u;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    load_a<kHeadDim>(rows.q[r], q, first_row + 16 * r, block.q_len, flip);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
      rows.o[r][n][0] = rows.o[r][n][1] = rows.o[r][n][2] = rows.o[r][n][3] = 0.0f;
    rows.row_max[r][0] = rows.row_max[r][1] = -INFINITY;
    rows.sum[r][0] = rows.sum[r][1] = 0.0f;
  }
  const AttentionDropout dropout(p.args.rng, p.args.keep_threshold,
                                 of_warp(block.sequence * p.args.heads + block.head));
  const QueryBias<T, kBias> bias(p, block, windows, first_row);

  const float unit = kBias ? 1.0f : scale;  // of scores, once they have their bias
  const bool active = first_row < block.q_len;
  const auto all_steps = [](int) { return false; };
  const auto nothing = [](int) {};
  if constexpr (kScoresAhead<kHeadDim, kWindow>) {
    constexpr uint32_t kHalf = SharedTile<kHeadDim>::bytes(32);
    const int last = keys.tiles() - 1;
    typename decltype(rows)::template Scores<2> s, next;
    keys.start(1);
    copy_async_wait<1>();
    sync_block();  // the first tile is there for all
    if (active && last >= 0) {
      rows.template score<2>(s, keys.keys(0), 0);
      rows.template score<2>(s, keys.keys(0), 1);
    }
    for (int tile = 0; tile < last; ++tile) {
      const int first_key = tile * keys.kKeys;
      const uint32_t values = keys.values(tile);
      if (active)
        rows.softmax_step_and_score(s, values, next, keys.keys(tile) + kHalf, unit, dropout,
                                    first_row, first_key);
      copy_async_wait<0>();
      sync_block();  // the next tile is there for all, and all are done with the keys of this one
      keys.start(tile + 2);
      if (active)
        rows.softmax_step_and_score(next, values + kHalf, s, keys.keys(tile + 1), unit, dropout,
                                    first_row, first_key + 32);
    }
    if (active && last >= 0) {
      int first_key = last * keys.kKeys;
      uint32_t values = keys.values(last);
      if (first_key + 32 < block.k_len) {
        rows.softmax_step_and_score(s, values, next, keys.keys(last) + kHalf, unit, dropout,
                                    first_row, first_key);
        first_key += 32;
        values += kHalf;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
          for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int i = 0; i < 8; ++i) s[r][step][i / 4][i % 4] = next[r][step][i / 4][i % 4];
      }
#pragma unroll
      for (int step = 0; step < 2; ++step)
        rows.template mask<2>(s, step, first_key, block.k_len - first_key);
      rows.template softmax_step<2>(s, values, unit, dropout, first_row, first_key, all_steps,
                                    nothing);
    }
  } else {
    constexpr int kSteps = keys.kKeys / 16;
    for (int tile = first_tile; tile < keys.tiles(); ++tile) {
      copy_async_wait<0>();
      sync_block();  // the tile is there for all, and all are done with the one before it
      keys.start(tile + 1);
      const int first_key = tile * keys.kKeys, last_key = first_key + keys.kKeys - 1;
      if (!active || !any.meets(first_key, last_key)) continue;
      const auto add = [&](const auto& skips, const auto& mask) {
        typename decltype(rows)::template Scores<kSteps> s;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (skips(step)) continue;
          rows.template score<kSteps>(s, keys.keys(tile), step);
          if constexpr (kBias) bias.add(s[0][step], first_key + 16 * step, scale);
          mask(s, step);
        }
        rows.template softmax_step<kSteps>(s, keys.values(tile), unit, dropout, first_row,
                                           first_key, skips, nothing);
      };
      if (all.holds(first_key, last_key))
        add(all_steps, [](auto&, int) {});
      else
        add([&](int step) { return !any.meets(first_key + 16 * step, first_key + 16 * step + 15); },
            [&](auto& s, int step) {
              rows.template mask<kSteps>(s, step, first_key, block.k_len - first_key);
            });
    }
  }
  if (!active) return;

  const AttentionBlock place = kept.get();
  const int first = first_row_of(place);
  const HeadRows<T> out(p.args.out_w, place.q_begin, place.head);
  float* lse = p.args.lse + static_cast<uint32_t>(place.head) * p.args.q_tokens + place.q_begin;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_sum(rows.sum[r][half]);
      factor[half] = total > 0.0f ? p.keep / total : total;  // 0 without keys; a NaN stays one
      // Not kept since the queries were loaded: there are no registers for it.
      const int row = first + 16 * r + 8 * half + static_cast<int>(keep_in_register(lane)) / 4;
      if (lane % 4 == 0 && row < place.q_len)
        store_global<float>(lse + static_cast<uint32_t>(row),
                            fma(rows.row_max[r][half], unit, log2f(total)) * kLn2);
    }
    store_rows<T>(rows.o[r], factor[0], factor[1], out, first + 16 * r, place.q_len, 0);
  }
}

}  // namespace bert_unpad
