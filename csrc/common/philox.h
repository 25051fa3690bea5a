// Philox4x32-7 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) and the
// coordinates from which every dropout mask of this package is drawn. Seven rounds pass BigCrush
// (in the paper) and, with these coordinates, tests/ops/test_dropout_quality.py.
//
// The counter holds element coordinates, never thread ids, so the CPU, the GPU, any tiling and any
// grouping draw the same mask, and a backward pass recomputes it instead of storing it. One call
// gives 128 bits = 16 decisions: on the 8 half-words of these bits, then on the 8 half-words of the
// same bits rotated right by a byte. So two decisions may share a byte; their correlation is at
// most 0.0039 at any rate. An element is kept by the rule below in exactly keep_threshold(p) of the
// 65,536 cases, and the scale is the reciprocal of that rate.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace bert_unpad {

struct Philox4 {
  uint32_t w[4];
};

inline constexpr int kPhiloxRounds = 7;
inline constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;

BU_HD Philox4 philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                         uint32_t k1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c0;
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxM1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

// The (seed, offset) pair that an operator call gets, split into Philox's key and the last counter
// word.
struct RngKey {
  uint32_t k0, k1, offset;
};

BU_HD RngKey rng_key(int64_t seed, int64_t offset) {
  const auto s = static_cast<uint64_t>(seed), o = static_cast<uint64_t>(offset);
  return {static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32) ^ static_cast<uint32_t>(o >> 32),
          static_cast<uint32_t>(o)};
}

// How many of the 65,536 values of 16 bits keep an element; all of them for p = 0.
BU_HD uint32_t keep_threshold(double p) { return static_cast<uint32_t>((1.0 - p) * 65536.0 + 0.5); }
BU_HD float keep_scale(uint32_t threshold) {
  return threshold == 0 ? 0.0f : 65536.0f / static_cast<float>(threshold);
}
// The rate whose reciprocal that is; exact.
BU_HD float keep_rate(uint32_t threshold) { return static_cast<float>(threshold) / 65536.0f; }

// How 16 bits decide. They are read as a half-precision number x, because a GPU compares two pairs
// of these in one instruction, and x is compared with a limit: `dropped` = 65,536 - threshold of
// all x are below it, and are dropped. There is no such limit for a `dropped` of 31,745 (-0 and 0
// are equal) and none above 63,489 (NaNs are below nothing): then `threshold` of all x are below
// the limit, and are kept.
struct KeepRule {
  uint32_t limit;  // a half-precision number
  uint32_t flip;   // all ones where what is below the limit is dropped, 0 where it is kept
};

// How many half-precision numbers are below this one; NaNs are last, and -0 comes before 0.
BU_HD uint32_t half_rank(uint32_t x) {
  return (((x & 0x8000u) != 0 ? x ^ 0x7fffu : x) + 0x7c01u) & 0xffffu;
}

BU_HD KeepRule keep_rule(uint32_t threshold) {
  const uint32_t dropped = 65536u - threshold;
  const bool kept_below = dropped > 63489u || dropped == 31745u;
  const uint32_t rank = kept_below ? threshold : dropped;
  return {rank <= 31744u ? 0xfc00u - rank : rank - 31745u, kept_below ? 0u : ~0u};
}

// The bits of the last 8 decisions.
BU_HD Philox4 rotated(const Philox4& bits) {
  Philox4 r;
  for (int i = 0; i < 4; ++i) r.w[i] = bits.w[i] >> 8 | bits.w[(i + 1) % 4] << 24;
  return r;
}

// Row-wise dropout (hidden states): one call covers 16 neighbouring columns of one row.
//   counter = (column / 16, row, 0, offset); element column % 16 = decision column % 16 of the
//   call.
inline constexpr int kRowDropoutGroup = 16;

BU_HD Philox4 row_dropout_bits(RngKey key, uint32_t row, uint32_t column16) {
  return philox4x32(column16, row, 0u, key.offset, key.k0, key.k1);
}

// Attention dropout: one call covers the 16 scores that one thread of mma.sync m16n8k16 or of wgmma
// holds of four neighbouring n8 tiles: rows r and r + 8 of a 16-row tile, columns 8j + 2t and
// 8j + 2t + 1 of a 32-column tile (t, j = 0..3).
//   counter = (8 * (row / 16) + row % 8, 4 * (column / 32) + t, 1 + sequence * heads + head,
//   offset)
//   decision = 8 * (column / 16 % 2) + 4 * (row / 8 % 2) + 2 * (column / 8 % 2) + column % 2
// The sequence-head word starts at 1: 0 is row dropout. The column word comes second because a loop
// over columns then has the least of the first three rounds to do again.
struct AttentionDropoutCoord {
  uint32_t column_word, row_word;
  int decision;
};

BU_HD AttentionDropoutCoord attention_dropout_coord(uint32_t row, uint32_t column) {
  return {(column >> 5) * 4 + ((column >> 1) & 3), (row >> 4) * 8 + (row & 7),
          static_cast<int>(((column >> 4) & 1) * 8 + ((row >> 3) & 1) * 4 +
                           ((column >> 3) & 1) * 2 + (column & 1))};
}

BU_HD Philox4 attention_dropout_bits(RngKey key, uint32_t sequence_head, uint32_t row_word,
                                     uint32_t column_word) {
  return philox4x32(row_word, column_word, 1u + sequence_head, key.offset, key.k0, key.k1);
}

// The 16 bits of a decision. Without indexing by a variable, which would put the words into a GPU's
// local memory.
BU_HD uint32_t decision_bits(const Philox4& bits, int decision) {
  const uint32_t low = decision & 2 ? bits.w[1] : bits.w[0];
  const uint32_t high = decision & 2 ? bits.w[3] : bits.w[2];
  const uint32_t next = decision & 2 ? bits.w[2] : bits.w[1];
  const uint32_t after = decision & 2 ? bits.w[0] : bits.w[3];
  const uint32_t word = decision & 4 ? high : low, follow = decision & 4 ? after : next;
  const int shift = 16 * (decision & 1) + (decision & 8);
  return static_cast<uint32_t>((static_cast<uint64_t>(follow) << 32 | word) >> shift) & 0xffffu;
}

}  // namespace bert_unpad
