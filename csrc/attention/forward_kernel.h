// The forward pass on tensor cores: dropout(softmax(q k^T * scale)) v, with an online softmax (Dao,
// "FlashAttention-2", 2023).
//
// A block of 4 warps takes 64 * kRowTiles queries of one head, a warp 16 * kRowTiles of them. Keys
// and values come in tiles of 64; the next tile is copied while the current one is used. With one
// row tile per warp, shared memory is the limit (128 bytes per clock); two halve what a warp reads
// per product. A row's result does not depend on kRowTiles.
//
// kWindow: queries see the keys of a window. A block takes the tiles of keys that one of its
// queries sees, a warp of these the steps of 16 keys that one of its own sees; scores are masked
// where not all of them see all keys. A launch with a position bias takes the kernel for windows.
#pragma once

#include "attention/dropout.h"
#include "attention/kernel_parts.h"
#include "attention/query_windows.h"
#include "attention/score_bias.h"

namespace bert_unpad {

inline constexpr int kForwardWarps = 4;

template <class T, int kHeadDim>
using ForwardKeys = KeyTiles<T, kHeadDim, kForwardWarps>;

// A warp's rows: queries, what they have summed so far, and one step of it.
template <class T, int kHeadDim, int kRowTiles, bool kDropout, bool kWindow, bool kBias>
struct ForwardRows {
  static_assert((!kWindow && !kBias) || kRowTiles == 1);
  static constexpr int kKeys = ForwardKeys<T, kHeadDim>::kKeys, kSteps = kKeys / 16;
  Operands<kHeadDim> operands;
  uint32_t q[kRowTiles][kHeadDim / 16][4];
  float o[kRowTiles][kHeadDim / 8][4];
  // The largest score so far of rows g and g + 8, before scaling; with a bias in base 2.
  float top[kRowTiles][2];
  float sum[kRowTiles][2];  // sum of the exponentials in this lane's columns
  RowRange seen[2];         // with a window: the keys that rows g and g + 8 see

  // Takes in a tile of keys and values, of which the rows see `from` .. `to` - 1 at most; all of
  // these, if `all`. `first_row` is the first query's row, `first_key` the tile's first key, both
  // in the sequence.
  BU_DEVICE void add_tile(uint32_t k_tile, uint32_t v_tile, int from, int to, bool all, float scale,
                          const QueryBias<T, kBias>& bias, const AttentionDropout& dropout,
                          int first_row, int first_key) {
    float s[kRowTiles][kSteps][2][4] = {};
    scores(s, k_tile, from, to);
    if constexpr (kBias) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        if (!skips(step, from, to)) bias.add(s[0][step], first_key + 16 * step, scale);
      scale = 1.0f;
    }
    if constexpr (kWindow) {
      if (!all) mask(s[0], first_key);
    }
    softmax(s, scale);
    const bool draws = kDropout && (!kBias || dropout.draws());
    [[maybe_unused]] Philox4 drawn[kRowTiles];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (skips(step, from, to)) continue;
      uint32_t weights[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        pack_a<T>(weights[r], s[r][step][0], s[r][step][1]);
        if (draws) {
          if (step % 2 == 0 || (kWindow && skips(step - 1, from, to)))
            drawn[r] = dropout.draw(first_row / 16 + r, first_key / 32 + step / 2);
          dropout.apply(weights[r], dropout.tile(drawn[r], step % 2 != 0));
        }
      }
#pragma unroll
      for (int n = 0; n < kHeadDim / 16; ++n) {
        uint32_t b[4];
        operands.b_transposed(b, v_tile, 16 * step, n);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma<T>(o[r][2 * n], weights[r], b[0], b[1]);
          mma<T>(o[r][2 * n + 1], weights[r], b[2], b[3]);
        }
      }
    }
  }

 private:
  static BU_DEVICE bool skips(int step, int from, int to) {
    return 16 * step >= to || (kWindow && 16 * step + 16 <= from);
  }

  BU_DEVICE void scores(float (&s)[kRowTiles][kSteps][2][4], uint32_t k_tile, int from, int to) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (skips(step, from, to)) continue;
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) {
        uint32_t b[4];
        operands.b(b, k_tile, 16 * step, d);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma<T>(s[r][step][0], q[r][d], b[0], b[1]);
          mma<T>(s[r][step][1], q[r][d], b[2], b[3]);
        }
      }
    }
    if (!kWindow && to < kKeys) {
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (8 * n + 2 * (threadIdx.x % 4) + i % 2 < to) continue;
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) s[r][n / 2][n % 2][i] = -INFINITY;
        }
      }
    }
  }

  BU_DEVICE void mask(float (&s)[kSteps][2][4], int first_key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int from = seen[half].begin - first_key - 2 * static_cast<int>(threadIdx.x % 4);
      const auto count = static_cast<uint32_t>(seen[half].end - seen[half].begin);
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (static_cast<uint32_t>(8 * n + i - from) >= count)
            s[n / 2][n % 2][2 * half + i] = -INFINITY;
        }
      }
    }
  }

  // Turns scores into exponentials relative to the largest score so far, and rescales what was
  // summed relative to an older one.
  BU_DEVICE void softmax(float (&s)[kRowTiles][kSteps][2][4], float scale) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = top[r][half];
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) {
          const float (&pair)[4] = s[r][n / 2][n % 2];
          most = fmaxf(most, fmaxf(pair[2 * half], pair[2 * half + 1]));
        }
        most = quad_max(most);
        // A row that has seen no key yet has no largest score.
        const float base = kWindow && most == -INFINITY ? 0.0f : most;
        const float shrink = exp2_approx((top[r][half] - base) * scale);
        const float offset = base * scale;
        top[r][half] = most;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            float& x = s[r][n / 2][n % 2][i];
            x = exp2_approx(fma(x, scale, -offset));
            total += x;
          }
        }
        sum[r][half] = fma(sum[r][half], shrink, total);
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          o[r][n][2 * half] *= shrink;
          o[r][n][2 * half + 1] *= shrink;
        }
      }
    }
  }
};

template <class T, int kHeadDim, int kRowTiles, bool kDropout, bool kWindow, class Launch>
BU_KERNEL(32 * kForwardWarps, kHeadDim == 64 && kWindow && !kHasBias<Launch> ? 3 : 2)
attention_forward_kernel(BU_PARAMS Launch p) {
  constexpr bool kBias = kHasBias<Launch>;
  const AttentionBlock block = attention_block(p);
  const int block_row = block.tile * kForwardWarps * 16 * kRowTiles;
  if (block_row >= block.q_len) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = block_row + warp * 16 * kRowTiles;
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
  const ForwardKeys<T, kHeadDim> keys(p.args, block, block_keys.end);
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
    rows.top[r][0] = rows.top[r][1] = -INFINITY;
    rows.sum[r][0] = rows.sum[r][1] = 0.0f;
  }
  const AttentionDropout dropout(p.args.rng, p.args.keep_threshold,
                                 block.sequence * p.args.heads + block.head);
  const QueryBias<T, kBias> bias(p, block, windows, first_row);

  for (int tile = first_tile; tile < keys.tiles(); ++tile) {
    copy_async_wait<0>();
    sync_block();  // the tile is there for all, and all are done with the one before it
    keys.start(tile + 1);
    if (first_row >= block.q_len) continue;
    const int first_key = tile * keys.kKeys;
    if (kWindow && !any.meets(first_key, first_key + keys.kKeys - 1)) continue;
    rows.add_tile(keys.keys(tile), keys.values(tile), any.begin - first_key, any.end - first_key,
                  all.holds(first_key, first_key + keys.kKeys - 1), scale, bias, dropout, first_row,
                  first_key);
  }
  if (first_row >= block.q_len) return;

  const HeadRows<T> out(p.args.out_w, block.q_begin, block.head);
  float* lse = p.args.lse + block.head * p.args.q_tokens + block.q_begin;
  const float keep = kDropout ? keep_scale(p.args.keep_threshold) : 1.0f;
  const float unit = kBias ? 1.0f : scale;  // of `top`
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_sum(rows.sum[r][half]);
      factor[half] = total > 0.0f ? keep / total : total;  // 0 without keys; a NaN stays one
      const int row = first_row + 16 * r + 8 * half + lane / 4;
      if (lane % 4 == 0 && row < block.q_len)
        store_global<float>(lse + row, fma(rows.top[r][half], unit, log2f(total)) * kLn2);
    }
    store_rows<T>(rows.o[r], factor[0], factor[1], out, first_row + 16 * r, block.q_len, 0);
  }
}

}  // namespace bert_unpad
