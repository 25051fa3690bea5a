// dK and dV on tensor cores, and dQ with them where there are enough heads (Dao,
// "FlashAttention-2", 2023, for the formulas).
//
// A warp owns 16 keys, or 32 where the kernel is fused. Scores are computed transposed (keys x
// queries): weights and score gradients then leave the tensor cores in the layout that the products
// with dout and Q need for their A operand. Queries come in tiles of 64 or 32;
// the next tile is copied while the current one is used.
//
// kFused: a block owns a whole head of a sequence and passes over its keys, 32 * kWarps at a time.
// With 32 keys a warp, what it reads of q and dout in shared memory serves twice as many products;
// shared memory is this kernel's limit. V stays in registers as A operands, K comes from the tile
// in shared memory that dQ needs too. dQ needs the score gradients of all warps; they meet in
// shared memory. There are no atomics, and with one pass every operand is read from memory once.
//
// Not fused: a block owns 16 * kWarps keys, whose rows of K and V stay in registers, and
// backward_dq_kernel.h computes dQ and delta first.
//
// kGeneral (not fused): several heads may read the keys, and queries may see those of a window
// only. A block passes over the heads, and takes the tiles of queries that see one of its keys, a
// warp of these the steps of 16 queries that see one of its own. With a position bias this kernel
// is taken too.
#pragma once

#include <algorithm>

#include "attention/backward_fused.h"
#include "attention/dropout.h"
#include "attention/kernel_parts.h"
#include "attention/query_windows.h"
#include "attention/table_bias.h"

namespace bert_unpad {

// Columns of dk and dv that a launch computes: all; with a position bias 64 of 128, because there
// are not enough registers for more.
template <int kHeadDim, bool kBias>
inline constexpr int kKeyColumns = kBias && kHeadDim == 128 ? 64 : kHeadDim;

// A warp's keys, kRowTiles times 16: their rows, and the gradients that these have gathered.
template <class T, int kHeadDim, int kRowTiles, int kQueries, bool kDropout, bool kGeneral,
          bool kBias>
struct BackwardKeys {
  static_assert(kRowTiles == 1 || (kHeadDim <= 64 && !kGeneral));
  // 128 columns of K and V do not fit into registers beside dK and dV; they come from L1 then, 16
  // columns at a time. Nor does K of 32 keys, which comes from shared memory.
  static constexpr bool kKeepRows = kHeadDim <= 64, kSharedK = kRowTiles == 2;
  static constexpr int kKept = kKeepRows ? kHeadDim / 16 : 1;
  // Unrolled. A general kernel has no registers to spare for two of 128 columns' loads at a time.
  static constexpr int kColumnSteps = kKeepRows                     ? kHeadDim / 16
                                      : kGeneral && kHeadDim == 128 ? 1
                                                                    : 2;

  static constexpr int kColumns = kKeyColumns<kHeadDim, kBias>;
  // Which takes an instruction less a score than to mask the gradients of weights and the operand,
  // but on Blackwell there are no registers for it.
  static constexpr bool kMasksWeights = kDropout && !kBlackwell;

  HeadRows<const T> k, v;
  int first, end;  // the first of the keys in the sequence, and the sequence's length
  Operands<kHeadDim> operands;
  uint32_t k_rows[kSharedK ? 1 : kKept][4], v_rows[kRowTiles][kKept][4];
  float dk[kRowTiles][kColumns / 8][4], dv[kRowTiles][kColumns / 8][4];

  BU_DEVICE BackwardKeys(const cuda::AttentionCudaParams& a, const AttentionBlock& block)
      : k(a.k, block.k_begin, block.kv_head),
        v(a.v, block.k_begin, block.kv_head),
        end(block.k_len) {}

  // Where the rows are, from the sequence's first token.
  BU_DEVICE void find(const cuda::AttentionCudaParams& a, const AttentionBlock& block, int begin) {
    k = HeadRows<const T>(a.k, begin, block.kv_head);
    v = HeadRows<const T>(a.v, begin, block.kv_head);
  }

  BU_DEVICE void start(int first_key) {
    first = first_key;
    if constexpr (kKeepRows) {
      if constexpr (!kSharedK) load_a<kHeadDim>(k_rows, k, first, end, 0);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) load_a<kHeadDim>(v_rows[r], v, first + 16 * r, end, 0);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        for (int i = 0; i < 4; ++i) dk[r][n][i] = dv[r][n][i] = 0.0f;
    }
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

  // Takes in 16 queries, `first_query` the first one in the sequence. Where things begin in shared
  // memory: `q_rows`, their rows of q, and those of dout kQueries rows later; `k_rows_at`,
  // the warp's rows of K (with kSharedK); `values`, lse and delta of the queries, in turns.
  // `keep`: the scale of what dropout keeps; `hidden`: scores outside of windows. Returns the
  // gradients of the scores, divided by `keep`, as A operands [keys, queries].
  BU_DEVICE void add_queries(uint32_t (&gradients)[kRowTiles][4], uint32_t q_rows,
                             uint32_t k_rows_at, uint32_t values, int first_query, float scale,
                             const AttentionDropout& dropout, float keep, uint32_t hidden,
                             const KeyBias<T, kBias>& bias,
                             const DistanceStrip<kBias, kQueries>& strip, int first_column) {
    constexpr int kDout = kQueries;
    // [keys, queries]: scores; gradients of the weights.
    float s[kRowTiles][2][4] = {}, dp[kRowTiles][2][4] = {};
#pragma unroll kColumnSteps
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t b[4];
      operands.b(b, q_rows, 0, d);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        uint32_t (&a)[4] = k_rows[kSharedK ? 0 : d % kKept];
        if constexpr (kSharedK) operands.a(a, k_rows_at, 16 * r, d);
        if constexpr (!kKeepRows) load_a(a, k, first, end, d, 0);
        mma<T>(s[r][0], a, b[0], b[1]);
        mma<T>(s[r][1], a, b[2], b[3]);
      }
    }
#pragma unroll kColumnSteps
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t b[4];
      operands.b(b, q_rows, kDout, d);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        if constexpr (!kKeepRows) load_a(v_rows[0][0], v, first, end, d, 0);
        mma<T>(dp[r][0], v_rows[r][d % kKept], b[0], b[1]);
        mma<T>(dp[r][1], v_rows[r][d % kKept], b[2], b[3]);
      }
    }
    if (strip.used()) {
      const int lane = threadIdx.x % 32, column = first_query % kQueries + 2 * (lane % 4);
      strip.template add<-1>(s[0], scale, lane / 4 - column + kQueries - 1);
    } else {
      bias.add(s[0], first_query, scale);
    }
    const float unit = kBias ? 1.0f : scale;  // of a score, once it has its bias
    float offset[2][2], dots[2][2];           // of queries 8 n + 2t and 8 n + 2t + 1
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const auto x = load_shared<Vector<float, 4>>(values + 8 * (8 * n + 2 * (threadIdx.x % 4)));
      offset[n][0] = x.v[0] * kLog2e, offset[n][1] = x.v[2] * kLog2e;
      dots[n][0] = x.v[1], dots[n][1] = x.v[3];
    }
    const bool draws = kDropout && (!kBias || dropout.draws());
    Philox4 bits;
    if (draws) bits = dropout.draw_transposed(first_query / 16, first / 32);
    uint32_t weights[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      float kept[2][4];  // weights that are not dropped
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // key g + 8 * (i / 2 % 2), query 2t + i % 2
        float& weight = s[r][i / 4][i % 4];
        weight = exp2_approx(fma(weight, unit, -offset[i / 4][i % 2]));
        if (hidden >> i & 1) weight = 0.0f;
        kept[i / 4][i % 4] = weight;
      }
      DropoutTile drawn;
      if (draws) {
        drawn =
            AttentionDropout::transposed_tile(bits, kRowTiles == 2 ? r != 0 : first / 16 % 2 != 0);
        dropout.apply(kMasksWeights ? kept : dp[r], drawn);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
        dp[r][i / 4][i % 4] = score_gradient<kMasksWeights>(
            s[r][i / 4][i % 4], kept[i / 4][i % 4], dp[r][i / 4][i % 4], dots[i / 4][i % 2]);
      pack_a<T>(weights[r], kept[0], kept[1]);
      if (draws && !kMasksWeights) dropout.apply(weights[r], drawn);
      pack_a<T>(gradients[r], dp[r][0], dp[r][1]);
    }
    bias.put(dp[0]);
    bias.add_up(first_query, {first_query, first_query + 16}, keep);
    keep_loads_behind();
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t b[4];
      operands.b_transposed(b, q_rows, kDout, first_column / 16 + n);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        mma<T>(dv[r][2 * n], weights[r], b[0], b[1]);
        mma<T>(dv[r][2 * n + 1], weights[r], b[2], b[3]);
      }
      operands.b_transposed(b, q_rows, 0, first_column / 16 + n);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        mma<T>(dk[r][2 * n], gradients[r], b[0], b[1]);
        mma<T>(dk[r][2 * n + 1], gradients[r], b[2], b[3]);
      }
    }
  }

  // Puts score gradients where the warps that compute dQ find them, [keys, queries]; `step`
  // counts 16 queries. Those of rows beyond the last key may be infinite; they must not meet zeros.
  BU_DEVICE void share(const uint32_t (&gradients)[kRowTiles][4], uint32_t tile, int step) const {
    const int thread = static_cast<int>(keep_in_register(threadIdx.x)), lane = thread % 32;
    const int row = thread / 32 * 16 * kRowTiles + lane / 4;
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) {  // 8 rows
      const bool valid = first + 8 * r + lane / 4 < end;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = SharedTile<kQueries>::offset(row + 8 * r, 2 * step + half);
        store_shared<uint32_t>(tile + at + 4 * (lane % 4),
                               valid ? gradients[r / 2][2 * half + r % 2] : 0u);
      }
    }
  }

  BU_DEVICE void store(const cuda::AttentionCudaParams& a, const AttentionBlock& block, float keep,
                       int first_column) {
    const uint32_t begin = keep_in_register(block.k_begin);
    const int first = static_cast<int>(keep_in_register(this->first));
    const int head = static_cast<int>(keep_in_register(block.kv_head));
    const int column = static_cast<int>(keep_in_register(first_column));
    const HeadRows<T> dk_rows(a.dk, begin, head), dv_rows(a.dv, begin, head);
    const float unit = a.scale * keep;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      store_rows<T>(dk[r], unit, unit, dk_rows, first + 16 * r, end, column);
      store_rows<T>(dv[r], keep, keep, dv_rows, first + 16 * r, end, column);
    }
  }
};

// What a position bias has in shared memory from `first` on: gradients, strips, a table for each
// warp.
template <int kWarps, int kQueries>
struct KeyBiasShared {
  using Strip = DistanceStrip<true, kQueries>;
  static constexpr uint32_t strips(uint32_t first) {
    return first + kWarps * GradientTile<16>::kBytes;
  }
  static constexpr uint32_t tables(uint32_t first) {
    return strips(first) + kWarps * Strip::kBytes;
  }
  static constexpr uint32_t bytes(uint32_t first) {
    return tables(first) + kWarps * Strip::kTableBytes;
  }
};

// Blocks on an SM that registers have to allow.
template <int kHeadDim, int kWarps, bool kFused, bool kBias>
inline constexpr int kBackwardBlocks = kFused                     ? 8 / kWarps
                                       : kHeadDim == 32 && !kBias ? 3
                                                                  : 1;

template <class T, int kHeadDim, int kWarps, bool kDropout, bool kFused, bool kGeneral,
          int kQueries, class Launch>
BU_KERNEL(32 * kWarps, (kBackwardBlocks<kHeadDim, kWarps, kFused, kHasBias<Launch>>))
attention_backward_kernel(BU_PARAMS Launch p) {
  constexpr bool kBias = kHasBias<Launch>;
  static_assert(!kFused || !kGeneral);
  static_assert(!kBias || kGeneral);
  using Shared = BackwardShared<kHeadDim, kWarps, kFused, kQueries>;
  using Tile = SharedTile<kHeadDim>;
  if constexpr (kNoProducts<T> || Shared::bytes(1) > kMostShared) leave_out();
  constexpr int kThreads = 32 * kWarps, kKeys = Shared::kKeys;
  constexpr int kRowTiles = kBackwardRowTiles<kFused>;
  const int warp_key = warp_number() * 16 * kRowTiles;
  AttentionBlock block = uniform(attention_block<true>(p));
  if constexpr (!kGeneral) block.head = block.kv_head;  // no other head reads these keys
  const int first_key = kFused ? 0 : block.tile * kKeys;
  if (!kFused && first_key >= block.k_len) return;

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

  BackwardKeys<T, kHeadDim, kRowTiles, kQueries, kDropout, kGeneral, kBias> keys(p.args, block);
  // Pointers, the thread's place and on Blackwell counts are computed again for each tile: there
  // are no registers to keep them in.
  const auto again = [](uint32_t x) { return static_cast<int>(keep_in_register(x)); };
  constexpr bool kKeptShared = Shared::kKeptShared;
  const KeptBlock<kKeptShared> kept(block, Shared::kBlock);
  // A fused block passes over the keys, kStep at a time, a general one over the heads that read its
  // keys.
  constexpr int kStep = kFused ? kKeys : 1;
  const auto end = [&] { return kFused ? kept.get().k_len : kGeneral ? p.group : 1; };
  const auto last = [&](int at) { return at >= end() - kStep; };
  const auto copy_queries = [&](int head, int tile, int stage) {
    const int begin = again(kept.get().q_begin), thread = again(threadIdx.x);
    const HeadRows<const T> q(p.args.q, begin, head), dout(p.args.dout, begin, head);
    const int first = tile * kQueries;
    copy_tile<kQueries, kThreads, kHeadDim>(Shared::stage(stage), q, first, block.q_len, thread);
    copy_tile<kQueries, kThreads, kHeadDim>(Shared::stage(stage) + Shared::kQueryTile, dout, first,
                                            block.q_len, thread);
    if constexpr (!kFused) {
      const int64_t values = head * p.args.q_tokens + block.q_begin;
      const float* lse = p.args.lse + values;
      const float* delta = p.args.delta + values;
      for (int i = threadIdx.x; i < 2 * kQueries; i += kThreads) {
        const int row = i % kQueries, to = stage % 2 * kQueries + row;
        copy_async_4(Shared::kRowValues + 8 * to + (i < kQueries ? 0 : 4),
                     (i < kQueries ? lse : delta) + first + row, first + row < block.q_len);
      }
    }
  };
  if constexpr (kFused) {
    if (block.q_len == 0 || block.k_len == 0) {
      store_zeros<T, kHeadDim, kWarps>(p.args, block);
      return;
    }
  }
  if (kFused || first_tile < query_tiles) copy_queries(block.head, first_tile, 0);

  const auto stream = [&] {
    const AttentionBlock at = kept.get();
    return static_cast<uint32_t>(at.sequence * p.args.heads + at.head);
  };
  AttentionDropout dropout(p.args.rng, p.args.keep_threshold, stream(), !kGeneral);
  // On Turing a register of its own: with the constant ptxas spills others.
  const float scale = kTuring ? p.args.scale * kLog2e : p.unit;
  [[maybe_unused]] const auto gradient_operands = [&] {
    if constexpr (kHeadDim == kQueries)
      return keys.operands;
    else
      return Operands<kQueries>();
  }();
  // Where sums of the head's dQ begin.
  [[maybe_unused]] const auto query_sums = [&] {
    const AttentionBlock at = kept.get();
    const int64_t heads_before = at.head * query_sum_rows(p.args.q_tokens, p.args.sequences);
    return p.args.dq_sums +
           (heads_before + query_sum_rows(again(at.q_begin), at.sequence)) * kHeadDim;
  };
  int first_column = 0;
  if constexpr (kKeyColumns<kHeadDim, kBias> < kHeadDim) first_column = p.first_column;
  int tiles_before = 0;  // of queries, over all passes
  for (int at = 0; at < end(); at += kStep) {
    const int pass_key = kFused ? at : first_key;
    if constexpr (kFused) {
      keys.find(p.args, kept.get(), again(kept.get().k_begin));
      if constexpr (!kKeptShared) dropout.stream = keep_in_register(dropout.stream);
      if (at > 0) sync_block();  // all are done with the keys of the pass before
      copy_tile<kKeys, kThreads, kHeadDim>(Shared::kKeyTile, keys.k, pass_key, block.k_len,
                                           again(threadIdx.x));
    }
    if (kFused || at == 0) {
      copy_async_commit();
      keys.start(pass_key + warp_key);
    }
    if (kFused && at == 0)
      fill_row_values<T, kHeadDim, kWarps>(p.args, again(kept.get().q_begin),
                                           again(kept.get().head), kept.get().q_len,
                                           Shared::kRowValues, keep_rate(p.args.keep_threshold));
    if constexpr (kKeptShared) dropout.stream = stream();
    const KeyBias<T, kBias> bias(p, block, {windows}, block.head + at, keys.first,
                                 Shared::bytes(0));
    bias.zero();
    using BiasShared = KeyBiasShared<kWarps, kQueries>;
    const DistanceStrip<kBias, kQueries> strip(
        p, BiasShared::strips(Shared::bytes(0)),
        BiasShared::tables(Shared::bytes(0)) + threadIdx.x / 32 * (4 * kMostDistances));
    if (strip.used()) strip.load(block.head + at, threadIdx.x % 32, 32);
    // A fused block has at least one tile.
    for (int tile = first_tile, next = 0; (kFused && tile == 0) || tile < query_tiles;
         tile = next, ++tiles_before) {
      const int count = kKeptShared ? at / kKeys * query_tiles + tile : tiles_before;
      next = needed(tile + 1);
      copy_async_wait<0>();
      sync_block();  // the tile is there for all, and all are done with the one before it
      const bool same_pass = next < query_tiles;
      if (same_pass || !last(at)) {
        const int head = kept.get().head + (!kGeneral ? 0 : same_pass ? at : at + 1);
        copy_queries(head, same_pass ? next : first_tile, count + 1);
      }
      copy_async_commit();

      const uint32_t values = Shared::kRowValues + 8 * kQueries * (kFused ? tile : count % 2);
      if (keys.first < kept.get().k_len) {
        if (strip.used()) {  // from the tile's last query to the warp's first key
          strip.fill(keys.first - block.k_len + block.q_len - (tile + 1) * kQueries + 1);
          sync_warp();
        }
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
          uint32_t gradients[kRowTiles][4];
          keys.add_queries(gradients, Shared::stage(count) + Tile::bytes(16 * step),
                           again(Shared::kKeyTile + Tile::bytes(warp_key)), values + 128 * step,
                           first_query, scale, dropout, p.keep, hidden, bias, strip, first_column);
          if constexpr (kFused) keys.share(gradients, Shared::kGradients, step);
        }
      }
      if constexpr (kFused) {
        BackwardQueries<T, kHeadDim, kWarps, kQueries> queries(kept.get(), tile,
                                                               again(threadIdx.x));
        queries.start(at > 0 ? query_sums() : nullptr);
        sync_block();  // all score gradients of the tile are there
        queries.add_keys(Shared::kKeyTile, keys.operands, Shared::kGradients, gradient_operands,
                         std::min(kept.get().k_len - at, kKeys));
        if (last(at))
          queries.store(HeadRows<T>(p.args.dq, again(kept.get().q_begin), kept.get().head),
                        kept.get().q_len, p.args.scale * p.keep);
        else
          queries.store_sums(query_sums());
      }
    }
    if constexpr (kGeneral) ++dropout.stream;
    if ((kFused || last(at)) && keys.first < kept.get().k_len)
      keys.store(p.args, kept.get(), p.keep, first_column);
  }
}

}  // namespace bert_unpad
