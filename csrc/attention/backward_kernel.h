// dK and dV on tensor cores, and dQ with them while it fits (Dao, "FlashAttention-2", 2023, for the
// formulas).
//
// A warp owns 16 keys. Its rows of K and V stay in registers as A operands, and scores are computed
// transposed (keys x queries): weights and score gradients then leave the tensor cores in the
// layout that the products with dout and Q need for their A operand. Queries come in tiles of 64;
// the next tile is copied while the current one is used.
//
// kFused: a block owns a whole head of a sequence and passes over its keys, 16 * kWarps at a time.
// dQ needs the score gradients of all warps; they meet in shared memory. Between passes the sums of
// dQ stay there in fp32, in the layout of the registers. So there are no atomics, and q, k, v, out
// and dout are read from memory once. Not fused: a block owns 16 * kWarps keys, and
// backward_dq_kernel.h computes dQ and delta first.
//
// kGeneral (not fused): several heads may read the keys, and queries may see those of a window
// only. A block passes over the heads, and takes the tiles of queries that see one of its keys, a
// warp of these the steps of 16 queries that see one of its own. With a position bias this kernel
// is taken too.
#pragma once

#include "attention/backward_fused.h"
#include "attention/dropout.h"
#include "attention/kernel_parts.h"
#include "attention/query_windows.h"
#include "attention/score_bias.h"

namespace bert_unpad {

// Columns of dk and dv that a launch computes: all; with a position bias 64 of 128, because there
// are not enough registers for more.
template <int kHeadDim, bool kBias>
inline constexpr int kKeyColumns = kBias && kHeadDim == 128 ? 64 : kHeadDim;

// A warp's 16 keys: their rows, and the gradients that these have gathered.
template <class T, int kHeadDim, bool kDropout, bool kGeneral, bool kBias>
struct BackwardKeys {
  // 128 columns of K and V do not fit into registers beside dK and dV; they come from L1 then, 16
  // columns at a time.
  static constexpr bool kKeepRows = kHeadDim <= 64;
  static constexpr int kKept = kKeepRows ? kHeadDim / 16 : 1;
  // Unrolled. A general kernel has no registers to spare for two of 128 columns' loads at a time.
  static constexpr int kColumnSteps = kKeepRows                     ? kHeadDim / 16
                                      : kGeneral && kHeadDim == 128 ? 1
                                                                    : 2;

  static constexpr int kColumns = kKeyColumns<kHeadDim, kBias>;

  HeadRows<const T> k, v;
  int first, end;  // the first of the keys in the sequence, and the sequence's length
  uint32_t flip;   // gives k the scale's sign, as q gets it in the forward pass
  Operands<kHeadDim> operands;
  uint32_t k_rows[kKept][4], v_rows[kKept][4];
  float dk[kColumns / 8][4], dv[kColumns / 8][4];

  BU_DEVICE BackwardKeys(const cuda::AttentionCudaParams& a, const AttentionBlock& block)
      : k(a.k, block.k_begin, block.kv_head),
        v(a.v, block.k_begin, block.kv_head),
        end(block.k_len),
        flip(a.scale < 0.0f ? kNegatePair : 0u) {}

  BU_DEVICE void start(int first_key) {
    first = first_key;
    if constexpr (kKeepRows) {
      load_a<kHeadDim>(k_rows, k, first, end, flip);
      load_a<kHeadDim>(v_rows, v, first, end, 0);
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
      for (int i = 0; i < 4; ++i) dk[n][i] = dv[n][i] = 0.0f;
  }

  // Which of this lane's 8 scores of 16 queries (see add_queries) are outside of their windows; bit
  // 4 * n + i.
  BU_DEVICE uint32_t hidden(const QueryWindows& windows, int first_query) const {
    const int lane = threadIdx.x % 32, key = first + lane / 4;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const RowRange seen = windows.keys(first_query + 2 * (lane % 4) + i / 2 * 8 + i % 2);
      if (!seen.holds(key, key)) bits |= 1u << (i / 2 * 4 + i % 2);
      if (!seen.holds(key + 8, key + 8)) bits |= 4u << (i / 2 * 4 + i % 2);
    }
    return bits;
  }

  // The same of scores with queries after the first `count` of the 16.
  BU_DEVICE uint32_t beyond(int count) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (2 * static_cast<int>(threadIdx.x % 4) + i / 2 * 8 + i % 2 >= count)
        bits |= 5u << (i / 2 * 4 + i % 2);
    return bits;
  }

  // Takes in 16 queries, rows `row` .. `row` + 15 of the tiles, `first_query` in the sequence.
  // `lse` and `delta`: where theirs begin in shared memory. `hidden`: scores outside of windows.
  // Returns the gradients of the scores, as an A operand [keys, queries].
  BU_DEVICE void add_queries(uint32_t (&gradients)[4], uint32_t q_tile, uint32_t dout_tile, int row,
                             int first_query, uint32_t lse, uint32_t delta, float scale,
                             const AttentionDropout& dropout, float keep, uint32_t hidden,
                             const KeyBias<T, kBias>& bias, int first_column) {
    const int lane = threadIdx.x % 32;
    float s[2][4] = {}, dp[2][4] = {};  // [keys, queries]: scores; gradients of the weights
#pragma unroll kColumnSteps
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t b[4];
      operands.b(b, q_tile, row, d);
      if constexpr (!kKeepRows) load_a(k_rows[0], k, first, end, d, flip);
      mma<T>(s[0], k_rows[d % kKept], b[0], b[1]);
      mma<T>(s[1], k_rows[d % kKept], b[2], b[3]);
    }
#pragma unroll kColumnSteps
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t b[4];
      operands.b(b, dout_tile, row, d);
      if constexpr (!kKeepRows) load_a(v_rows[0], v, first, end, d, 0);
      mma<T>(dp[0], v_rows[d % kKept], b[0], b[1]);
      mma<T>(dp[1], v_rows[d % kKept], b[2], b[3]);
    }
    bias.add(s, first_query, scale);
    const float unit = kBias ? 1.0f : scale;  // of a score, once it has its bias
    const bool draws = kDropout && (!kBias || dropout.draws());
    DropoutTile drawn;
    if (draws) {
      drawn = dropout.transposed_tile(dropout.draw_transposed(first_query / 16, first / 32),
                                      first / 16 % 2 != 0);
      dropout.apply(dp, drawn);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t at = 4 * (8 * n + 2 * (lane % 4));
      const FloatPair l = load_shared<FloatPair>(lse + at);
      const FloatPair dots = load_shared<FloatPair>(delta + at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // key g + 8 * (i / 2), query 2t + i % 2
        const float offset = (i % 2 ? l.high : l.low) * kLog2e;
        float weight = exp2_approx(fma(s[n][i], unit, -offset));
        if (hidden >> (4 * n + i) & 1) weight = 0.0f;
        s[n][i] = weight;
        dp[n][i] = weight * (dp[n][i] * keep - (i % 2 ? dots.high : dots.low));
      }
    }
    bias.add_gradients(dp, first_query);
    uint32_t weights[4];
    pack_a<T>(weights, s[0], s[1]);
    if (draws) dropout.apply(weights, drawn);
    pack_a<T>(gradients, dp[0], dp[1]);
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t b[4];
      operands.b_transposed(b, dout_tile, row, first_column / 16 + n);
      mma<T>(dv[2 * n], weights, b[0], b[1]);
      mma<T>(dv[2 * n + 1], weights, b[2], b[3]);
      operands.b_transposed(b, q_tile, row, first_column / 16 + n);
      mma<T>(dk[2 * n], gradients, b[0], b[1]);
      mma<T>(dk[2 * n + 1], gradients, b[2], b[3]);
    }
  }

  // Puts score gradients where the warps that compute dQ find them, [keys, 64 queries]; `step`
  // counts 16 queries. Those of rows beyond the last key may be infinite; they must not meet zeros.
  BU_DEVICE void share(const uint32_t (&gradients)[4], uint32_t tile, int step) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool valid = first + lane / 4 + 8 * (i % 2) < end;
      const uint32_t at = SharedTile<kBackwardQueries>::offset(row + 8 * (i % 2), 2 * step + i / 2);
      store_shared<uint32_t>(tile + at + 4 * (lane % 4), valid ? gradients[i] : 0u);
    }
  }

  BU_DEVICE void store(const cuda::AttentionCudaParams& a, const AttentionBlock& block, float keep,
                       int first_column) {
    store_rows<T>(dk, a.scale, a.scale, HeadRows<T>(a.dk, block.k_begin, block.kv_head), first, end,
                  first_column);
    store_rows<T>(dv, keep, keep, HeadRows<T>(a.dv, block.k_begin, block.kv_head), first, end,
                  first_column);
  }
};

template <class T, int kHeadDim, int kWarps, bool kDropout, bool kFused, bool kGeneral,
          class Launch>
BU_KERNEL(32 * kWarps, kHeadDim == 32 && !kHasBias<Launch> ? 3 : 1)
attention_backward_kernel(BU_PARAMS Launch p) {
  constexpr bool kBias = kHasBias<Launch>;
  static_assert(!kFused || !kGeneral);
  static_assert(!kBias || kGeneral);
  using Shared = BackwardShared<kHeadDim, kWarps, kFused>;
  constexpr int kThreads = 32 * kWarps, kKeys = Shared::kKeys, kQueries = kBackwardQueries;
  AttentionBlock block = attention_block<true>(p);
  if constexpr (!kGeneral) block.head = block.kv_head;  // no other head reads these keys
  const int first_key = kFused ? 0 : block.tile * kKeys;
  if (!kFused && first_key >= block.k_len) return;

  const uint32_t lse_at = Shared::kRowValues;
  const uint32_t delta_at = lse_at + 4 * Shared::rows(p.args.max_q);
  // A fused block passes over the keys, a general one over the heads that read its keys.
  const int passes = kFused ? (block.k_len + kKeys - 1) / kKeys : kGeneral ? p.group : 1;
  const QueryWindows windows(p.args, block);
  RowRange rows{0, block.q_len};
  if constexpr (kGeneral) rows = windows.queries(first_key, first_key + kKeys - 1);
  const int query_tiles = (rows.end + kQueries - 1) / kQueries;
  // The first tile from this one on with queries that see keys of the block.
  const auto needed = [&](int tile) {
    if constexpr (kGeneral) {
      while (tile < query_tiles &&
             !windows.keys_of_any(windows.template span<kQueries>(tile * kQueries))
                  .meets(first_key, first_key + kKeys - 1))
        ++tile;
    }
    return tile;
  };
  const int first_tile = needed(rows.begin / kQueries);

  const auto copy_queries = [&](int head, int tile, int stage) {
    const HeadRows<const T> q(p.args.q, block.q_begin, head);
    const HeadRows<const T> dout(p.args.dout, block.q_begin, head);
    const int first = tile * kQueries;
    copy_tile<kQueries, kThreads, kHeadDim>(Shared::stage(stage), q, first, block.q_len);
    copy_tile<kQueries, kThreads, kHeadDim>(Shared::stage(stage) + Shared::kQueryTile, dout, first,
                                            block.q_len);
    if constexpr (!kFused) {
      const int64_t values = head * p.args.q_tokens + block.q_begin;
      const float* lse = p.args.lse + values;
      const float* delta = p.args.delta + values;
      for (int i = threadIdx.x; i < 2 * kQueries; i += kThreads) {
        const int row = i % kQueries, to = stage % 2 * kQueries + row;
        copy_async_4((i < kQueries ? lse_at : delta_at) + 4 * to,
                     (i < kQueries ? lse : delta) + first + row, first + row < block.q_len);
      }
    }
  };
  if (first_tile < query_tiles && passes > 0) copy_queries(block.head, first_tile, 0);
  copy_async_commit();
  if constexpr (kFused) fill_row_values<T, kHeadDim, kWarps>(p.args, block, lse_at, delta_at);

  AttentionDropout dropout(p.args.rng, p.args.keep_threshold,
                           block.sequence * p.args.heads + block.head, !kGeneral);
  const float keep = kDropout ? keep_scale(p.args.keep_threshold) : 1.0f;
  const float scale = fabsf(p.args.scale) * kLog2e;
  BackwardKeys<T, kHeadDim, kDropout, kGeneral, kBias> keys(p.args, block);
  [[maybe_unused]] const BackwardQueries<T, kHeadDim, kWarps> queries;
  int first_column = 0;
  if constexpr (kKeyColumns<kHeadDim, kBias> < kHeadDim) first_column = p.first_column;
  int count = 0;  // of query tiles so far, over all passes
  for (int pass = 0; pass < passes; ++pass) {
    const int pass_key = kFused ? pass * kKeys : first_key;
    if (kFused || pass == 0) keys.start(pass_key + static_cast<int>(threadIdx.x) / 32 * 16);
    const KeyBias<T, kBias> bias(p, block, windows, block.head + pass, keys.first,
                                 Shared::query_sums(0));
    for (int tile = first_tile, next = 0; tile < query_tiles; tile = next, ++count) {
      next = needed(tile + 1);
      copy_async_wait<0>();
      sync_block();  // the tile is there for all, and all are done with the one before it
      if constexpr (kFused) {
        if (tile == 0) {
          copy_tile<kKeys, kThreads, kHeadDim>(Shared::kKeyTile, keys.k, pass_key, block.k_len);
          copy_async_commit();
        }
      }
      const bool same_pass = next < query_tiles;
      if (same_pass || pass + 1 < passes) {
        const int head = block.head + (!kGeneral ? 0 : same_pass ? pass : pass + 1);
        copy_queries(head, same_pass ? next : first_tile, count + 1);
      }
      copy_async_commit();

      const uint32_t q_tile = Shared::stage(count), dout_tile = q_tile + Shared::kQueryTile;
      const uint32_t values = 4 * kQueries * (kFused ? tile : count % 2);
      if (keys.first < block.k_len) {
#pragma unroll 1
        for (int step = 0; step < kQueries / 16; ++step) {
          const int first_query = tile * kQueries + 16 * step;
          if (first_query >= block.q_len) break;
          uint32_t hidden = 0;
          if (kGeneral && windows.bounded()) {
            const PositionSpan span = windows.template span<16>(first_query);
            if (!windows.keys_of_any(span).meets(keys.first, keys.first + 15)) continue;
            if (!windows.keys_of_all(span).holds(keys.first, keys.first + 15))
              hidden = keys.hidden(windows, first_query);
          }
          // Their scores are zero without a bias, and so are their gradients.
          if (kBias && first_query + 16 > block.q_len)
            hidden |= keys.beyond(block.q_len - first_query);
          uint32_t gradients[4];
          keys.add_queries(gradients, q_tile, dout_tile, 16 * step, first_query,
                           lse_at + values + 64 * step, delta_at + values + 64 * step, scale,
                           dropout, keep, hidden, bias, first_column);
          if constexpr (kFused) keys.share(gradients, Shared::kGradients, step);
        }
      }
      if constexpr (kFused) {
        // The keys have landed after their first tile; the next queries may be on their way.
        copy_async_wait<1>();
        sync_block();  // all score gradients of the tile are there
        const int there = block.k_len - pass_key;
        queries.add_keys(p.args, block, tile, Shared::query_sums(p.args.max_q), Shared::kKeyTile,
                         Shared::kGradients, there < kKeys ? there : kKeys, pass == 0,
                         pass + 1 == passes);
      }
    }
    if constexpr (kGeneral) ++dropout.stream;
    if ((kFused || pass + 1 == passes) && keys.first < block.k_len)
      keys.store(p.args, block, keep, first_column);
  }
  if constexpr (kFused) {
    if (passes == 0) queries.store_zeros(p.args, block);
  }
}

}  // namespace bert_unpad
