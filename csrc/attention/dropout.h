// Attention dropout in the layouts that tensor cores leave scores in.
//
// One Philox call decides on 16 scores (common/philox.h): a lane of the forward pass holds exactly
// these of 16 queries and 32 keys, in 4 C tiles. In the backward pass tiles are transposed; there
// two lanes draw one call each and exchange halves. A warp of the backward pass that has only 16
// keys has use for half of each call.
#pragma once

#include "cuda/architecture.h"
#include "cuda/dropout_pairs.h"

namespace bert_unpad {

// The decisions on a tile [16 x 16] of two C tiles side by side: pair[n][half] is of the scores
// c[n][2 * half] and c[n][2 * half + 1].
struct DropoutTile {
  uint32_t pair[2][2];
};

// Draws the masks of one sequence and head.
struct AttentionDropout {
  RngKey key;
  uint32_t stream;  // sequence * heads + head
  uint32_t threshold;
  PairRule rule;

  BU_DEVICE AttentionDropout(const int64_t* rng, uint32_t keep, uint32_t sequence_head,
                             bool rule_held = true)
      : key(load_rng_key(rng)), stream(sequence_head), threshold(keep), rule(keep, rule_held) {}

  // Whether there is dropout at all, for kernels that serve both cases.
  BU_DEVICE bool draws() const { return threshold < 65536u; }

  // Is one weight kept? A whole Philox call for it; true without dropout.
  BU_DEVICE bool keeps(int row, int column) const {
    if (!draws()) return true;
    const AttentionDropoutCoord at = attention_dropout_coord(row, column);
    const Philox4 bits = attention_dropout_bits(key, stream, at.row_word, at.column_word);
    return (rule.kept(decision_bits(bits, at.decision)) & 0xffffu) != 0;
  }

  // Scores [queries, keys]: the call for the 16 queries of tile row `row16` and the 32 keys of tile
  // column `column32`, and its decisions on the first or last 16 of these keys.
  BU_DEVICE Philox4 draw(int row16, int column32) const {
    const uint32_t lane = threadIdx.x % 32;
    return attention_dropout_bits(key, stream, row16 * 8 + lane / 4, column32 * 4 + lane % 4);
  }
  static BU_DEVICE DropoutTile tile(const Philox4& bits, bool last) {
    const Philox4 pairs = eight_decisions(bits, last);
    return {{{pairs.w[0], pairs.w[2]}, {pairs.w[1], pairs.w[3]}}};
  }

  // The same for scores [keys, queries]. Lanes with g = 2i and 2i + 1 need the calls of queries 2t
  // and 2t + 1 at column word i: the first lane their lower halves, the second one their upper
  // halves. Each draws one of the two.
  BU_DEVICE Philox4 draw_transposed(int row16, int column32) const {
    const uint32_t lane = (kBlackwell ? keep_in_register(threadIdx.x) : threadIdx.x) % 32,
                   g = lane / 4;
    return attention_dropout_bits(key, stream, row16 * 8 + 2 * (lane % 4) + g % 2,
                                  column32 * 4 + g / 2);
  }
  // All lanes take part.
  static BU_DEVICE DropoutTile transposed_tile(const Philox4& bits, bool last) {
    uint32_t mine[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      mine[i] = permute_bytes(bits.w[i], bits.w[(i + 1) % 4], last ? 0x4321u : 0x3210u);
    const bool upper = threadIdx.x / 4 % 2 != 0;
    const uint32_t other = upper ? 0x5410u : 0x7632u;
    const uint32_t first = upper ? 0x3254u : 0x5410u, second = upper ? 0x3276u : 0x7610u;
    DropoutTile tile;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t key0 = mine[2 * n], key8 = mine[2 * n + 1];
      const uint32_t got = shuffle_xor(permute_bytes(key0, key8, other), 4);
      tile.pair[n][0] = permute_bytes(key0, got, first);
      tile.pair[n][1] = permute_bytes(key8, got, second);
    }
    return tile;
  }

  // Zeroes what is dropped of two C tiles, or of the same packed as an A operand (pack_a).
  BU_DEVICE void apply(float (&c)[2][4], const DropoutTile& tile) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      rule.apply(c[i / 2][2 * (i % 2)], c[i / 2][2 * (i % 2) + 1], tile.pair[i / 2][i % 2]);
  }
  BU_DEVICE void apply(uint32_t (&a)[4], const DropoutTile& tile) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] &= rule.kept(tile.pair[i / 2][i % 2]);
  }
};

}  // namespace bert_unpad
