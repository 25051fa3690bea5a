// Where the kernel of backward_kernel.h keeps things in shared memory, and what it needs only where
// it is fused: dQ, and lse and delta of a whole head.
#pragma once

#include "attention/kernel_parts.h"

namespace bert_unpad {

// Queries of a tile, but for the fused kernel where memory is short. Of 128 columns there are 32,
// for the reason of QueryGradientKeys.
template <int kHeadDim>
inline constexpr int kBackwardQueries = kHeadDim == 128 ? 32 : 64;

// Of the fused kernel: warps of 32 keys each, and queries of a tile.
struct FusedShape {
  int warps = 0, queries = 0;
};

// Tiles of 16 keys that a warp of the kernel owns.
template <bool kFused>
inline constexpr int kBackwardRowTiles = kFused ? 2 : 1;

// Where things lie in shared memory.
template <int kHeadDim, int kWarps, bool kFused, int kQueries = kBackwardQueries<kHeadDim>>
struct BackwardShared {
  static constexpr int kKeys = 16 * kBackwardRowTiles<kFused> * kWarps;
  static constexpr uint32_t kQueryTile = SharedTile<kHeadDim>::bytes(kQueries);
  // Two stages, each a tile of q and one of dout.
  static BU_HD uint32_t stage(int i) { return i % 2 * 2 * kQueryTile; }
  static constexpr uint32_t kKeyTile = 4 * kQueryTile;
  // Score gradients, [keys, kQueries].
  static constexpr uint32_t kGradients = kKeyTile + SharedTile<kHeadDim>::bytes(kFused ? kKeys : 0);
  // What a fused block works on. Only on Blackwell, so bytes() is without it: kept_block_bytes().
  static constexpr uint32_t kBlock = kGradients + SharedTile<kQueries>::bytes(kFused ? kKeys : 0);
  static constexpr bool kKeptShared = kFused && kBlackwell;
  // lse and delta in turns: of all queries, or of two stages.
  static constexpr uint32_t kRowValues = kBlock + (kKeptShared ? KeptBlock<>::kBytes : 0);

  static constexpr int rows(int max_q) {
    return kFused ? (max_q + kQueries - 1) / kQueries * kQueries : 2 * kQueries;
  }
  static constexpr uint32_t bytes(int max_q) { return kRowValues + 8 * rows(max_q); }
};

// Rows of sums of dQ before those of a sequence, within a head's: its first query's and, because
// sums are of 16 queries each, at most 15 more for each sequence.
BU_HD int64_t query_sum_rows(int64_t queries, int sequences) {
  return queries + 15 * int64_t{sequences};
}

// dQ of a tile of queries of a head. Of 64, a warp takes 16 and, of 8 warps, half of the columns;
// of 4 warps 32 and half of 64 columns: fewer operands for each product than 16 x 64. Of 32, a warp
// takes 16 and half of 64 columns. While keys are to come, sums wait in global memory in fp32, in
// the layout of the registers: 16 bytes a lane of each 16 x 8 tile. Only the lane that wrote them
// reads them.
template <class T, int kHeadDim, int kWarps, int kQueries>
class BackwardQueries {
  static constexpr int kRowTiles = kWarps == 4 && kHeadDim == 64 && kQueries == 64 ? 2 : 1;
  static constexpr int kGroups = kQueries / 16 / kRowTiles;
  static constexpr int kColumns = kHeadDim * kGroups / kWarps;
  const int lane_, row_tile_, column_;  // the first of the warp's row tiles of the 4, and columns
  const int first_;                     // its first row in the sequence
  const bool there_;                    // whether that is before the sequence's end
  const int next_;  // row tiles from the first to the second; 0 where only the first is there
  float dq_[kRowTiles][kColumns / 8][4];

  // Where sums of a 16 x 8 tile lie, from the first of the head and sequence on.
  BU_DEVICE int place(int r, int n) const {
    return ((first_ / 16 + r * next_) * (kHeadDim / 8) + column_ / 8 + n) * 128 + 4 * lane_;
  }

 public:
  // `thread`: this one's number in the block.
  BU_DEVICE BackwardQueries(const AttentionBlock& block, int tile, uint32_t thread)
      : lane_(static_cast<int>(thread % 32)),
        row_tile_(static_cast<int>(thread / 32 % kGroups) * kRowTiles),
        column_(static_cast<int>(thread / 32 / kGroups) * kColumns),
        first_(tile * kQueries + 16 * row_tile_),
        there_(first_ < block.q_len),
        next_(first_ + 16 < block.q_len) {}

  // Begins with the sums of earlier keys; null: with zeros.
  BU_DEVICE void start(const float* sums) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        Vector<float, 4> x{};
        if (sums != nullptr && there_) x = load_global<Vector<float, 4>>(sums + place(r, n));
#pragma unroll
        for (int i = 0; i < 4; ++i) dq_[r][n][i] = x.v[i];
      }
    }
  }

  // Adds what the first `count` keys of the tile give.
  BU_DEVICE void add_keys(uint32_t key_tile, const Operands<kHeadDim>& key_operands,
                          uint32_t gradients, const Operands<kQueries>& gradient_operands,
                          int count) {
    if (!there_) return;
#pragma unroll 4
    for (int row = 0; row < count; row += 16) {
      uint32_t d[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
        gradient_operands.a_transposed(d[r], gradients, row, row_tile_ + r * next_);
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t b[4];
        key_operands.b_transposed(b, key_tile, row, column_ / 16 + n);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma<T>(dq_[r][2 * n], d[r], b[0], b[1]);
          mma<T>(dq_[r][2 * n + 1], d[r], b[2], b[3]);
        }
      }
    }
  }

  // As sums for the keys to come.
  BU_DEVICE void store_sums(float* sums) const {
    if (!there_) return;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float (&x)[4] = dq_[r][n];
        store_global<Vector<float, 4>>(sums + place(r, n), {x[0], x[1], x[2], x[3]});
      }
    }
  }

  // As rows of dQ, times `factor`.
  BU_DEVICE void store(const HeadRows<T>& rows, int q_len, float factor) const {
    if (!there_) return;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      store_rows<T>(dq_[r], factor, factor, rows, first_ + 16 * r, q_len, column_);
  }
};

// All gradients of a sequence without queries or without keys.
template <class T, int kHeadDim, int kWarps>
BU_DEVICE void store_zeros(const cuda::AttentionCudaParams& a, const AttentionBlock& block) {
  const float zeros[kHeadDim / 8][4] = {};
  const auto store = [&](const Packed<void>& all, uint32_t begin, int rows) {
    for (int row = threadIdx.x / 32 * 16; row < rows; row += 16 * kWarps)
      store_rows<T>(zeros, 1.0f, 1.0f, HeadRows<T>(all, begin, block.head), row, rows, 0);
  };
  store(a.dq, block.q_begin, block.q_len);
  store(a.dk, block.k_begin, block.k_len);
  store(a.dv, block.k_begin, block.k_len);
}

// lse and delta = rowsum(dout * out) times `unit`, in turns, of all queries of a head, into shared
// memory. A warp takes 32 queries at a time, so that it waits for memory less often.
template <class T, int kHeadDim, int kWarps>
BU_DEVICE void fill_row_values(const cuda::AttentionCudaParams& a, uint32_t begin, uint32_t head,
                               int q_len, uint32_t values, float unit) {
  const int lane = threadIdx.x % 32;
  const float* lse = a.lse + head * a.q_tokens + begin;
  const HeadRows<const T> dout(a.dout, begin, head);
  const HeadRows<const T> out(a.out, begin, head);
  for (int first = threadIdx.x / 32 * 16; first < q_len; first += 32 * kWarps) {
    uint32_t rows[2][kHeadDim / 16][4];
    float dots[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) load_a<kHeadDim>(rows[r], dout, first + 16 * kWarps * r, q_len, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      row_dots<kHeadDim>(dots[r], rows[r], out, first + 16 * kWarps * r, q_len);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + 16 * kWarps * r, mine = row + lane / 4 + 8 * (lane % 4);
      if (row >= q_len || lane % 4 >= 2) continue;
      store_shared<FloatPair>(
          values + 8 * mine,
          {mine < q_len ? load_global<float>(lse + static_cast<uint32_t>(mine)) : 0.0f,
           (lane % 4 ? dots[r][1] : dots[r][0]) * unit});
    }
  }
}

}  // namespace bert_unpad
