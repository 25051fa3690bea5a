// Where the kernel of backward_kernel.h keeps things in shared memory, and what it needs only where
// it is fused: dQ, and lse and delta of a whole head.
#pragma once

#include "attention/kernel_parts.h"

namespace bert_unpad {

inline constexpr int kBackwardQueries = 64;

// Where things lie in shared memory.
template <int kHeadDim, int kWarps, bool kFused>
struct BackwardShared {
  static constexpr int kKeys = 16 * kWarps;
  static constexpr uint32_t kQueryTile = SharedTile<kHeadDim>::bytes(kBackwardQueries);
  // Two stages, each a tile of q and one of dout.
  static BU_HD uint32_t stage(int i) { return i % 2 * 2 * kQueryTile; }
  static constexpr uint32_t kKeyTile = 4 * kQueryTile;
  // Score gradients, [keys, 64 queries].
  static constexpr uint32_t kGradients = kKeyTile + SharedTile<kHeadDim>::bytes(kFused ? kKeys : 0);
  // lse and delta: of all queries, or of two stages.
  static constexpr uint32_t kRowValues =
      kGradients + SharedTile<kBackwardQueries>::bytes(kFused ? kKeys : 0);

  static BU_HD int rows(int max_q) {
    return kFused ? (max_q + kBackwardQueries - 1) / kBackwardQueries * kBackwardQueries
                  : 2 * kBackwardQueries;
  }
  // Sums of dQ: of a 16 x 8 tile, 16 bytes a lane.
  static BU_HD uint32_t query_sums(int max_q) { return kRowValues + 8 * rows(max_q); }
  static BU_HD uint32_t bytes(int max_q, int max_k) {
    return query_sums(max_q) + (kFused && max_k > kKeys ? rows(max_q) * kHeadDim * 4 : 0);
  }
};

// dQ of a block's head. A warp takes 16 of a tile's 64 queries and, with 8 warps, half of the
// columns. Sums wait in shared memory between passes over the keys.
template <class T, int kHeadDim, int kWarps>
struct BackwardQueries {
  static constexpr int kColumns = kHeadDim / (kWarps / 4);
  Operands<kHeadDim> key_operands;
  Operands<kBackwardQueries> gradient_operands;

  // Adds what `keys` keys (the tile's first ones) give to the queries of a tile; `sums` is where
  // its sums wait. Stores the rows after the last pass.
  BU_DEVICE void add_keys(const cuda::AttentionCudaParams& a, const AttentionBlock& block, int tile,
                          uint32_t sums, uint32_t key_tile, uint32_t gradients, int keys,
                          bool first_pass, bool last_pass) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_tile = warp % 4, column = warp / 4 * kColumns;
    const int first_query = tile * kBackwardQueries + 16 * row_tile;
    if (first_query >= block.q_len) return;
    float dq[kColumns / 8][4] = {};
    const uint32_t at =
        sums + ((tile * 4 + row_tile) * (kHeadDim / 8) + column / 8) * 512 + lane * 16;
    if (!first_pass) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const auto x = load_shared<Vector<float, 4>>(at + 512 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i) dq[n][i] = x.v[i];
      }
    }
#pragma unroll 1
    for (int row = 0; row < keys; row += 16) {
      uint32_t d[4];
      gradient_operands.a_transposed(d, gradients, row, row_tile);
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t b[4];
        key_operands.b_transposed(b, key_tile, row, column / 16 + n);
        mma<T>(dq[2 * n], d, b[0], b[1]);
        mma<T>(dq[2 * n + 1], d, b[2], b[3]);
      }
    }
    if (last_pass) {
      store_rows<T>(dq, a.scale, a.scale, HeadRows<T>(a.dq, block.q_begin, block.head), first_query,
                    block.q_len, column);
    } else {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        store_shared<Vector<float, 4>>(at + 512 * n, {dq[n][0], dq[n][1], dq[n][2], dq[n][3]});
    }
  }

  // For sequences without keys.
  BU_DEVICE void store_zeros(const cuda::AttentionCudaParams& a,
                             const AttentionBlock& block) const {
    const float zeros[kHeadDim / 8][4] = {};
    for (int row = threadIdx.x / 32 * 16; row < block.q_len; row += 16 * kWarps)
      store_rows<T>(zeros, 1.0f, 1.0f, HeadRows<T>(a.dq, block.q_begin, block.head), row,
                    block.q_len, 0);
  }
};

// lse and delta = rowsum(dout * out) of all queries of a head, into shared memory.
template <class T, int kHeadDim, int kWarps>
BU_DEVICE void fill_row_values(const cuda::AttentionCudaParams& a, const AttentionBlock& block,
                               uint32_t lse_at, uint32_t delta_at) {
  const int lane = threadIdx.x % 32;
  const float* lse = a.lse + block.head * a.q_tokens + block.q_begin;
  const HeadRows<const T> dout(a.dout, block.q_begin, block.head);
  const HeadRows<const T> out(a.out, block.q_begin, block.head);
  for (int row = threadIdx.x / 32 * 16; row < block.q_len; row += 16 * kWarps) {
    uint32_t rows[kHeadDim / 16][4];
    load_a<kHeadDim>(rows, dout, row, block.q_len, 0);
    float dots[2];
    row_dots<kHeadDim>(dots, rows, out, row, block.q_len);
    if (lane % 4 < 2) {
      const int mine = row + lane / 4 + 8 * (lane % 4);
      store_shared<float>(lse_at + 4 * mine,
                          mine < block.q_len ? load_global<float>(lse + mine) : 0.0f);
      store_shared<float>(delta_at + 4 * mine, lane % 4 ? dots[1] : dots[0]);
    }
  }
}

}  // namespace bert_unpad
