// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) and the
// coordinates from which every dropout mask of this package is drawn.
//
// The counter holds element coordinates, never thread ids, so the CPU, the GPU, any tiling and any
// grouping draw the same mask, and a backward pass recomputes it instead of storing it. One call
// gives 128 bits = 8 decisions of 16 bits; an element is kept where its 16 bits are below
// keep_threshold(p), and the scale is the reciprocal of that exact rate.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace bert_unpad {

struct Philox4 {
  uint32_t w[4];
};

inline constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;

BU_HD Philox4 philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                            uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
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

// Row-wise dropout (hidden states): one call covers 8 neighbouring columns of one row.
//   counter = (column / 8, row, 0, offset); element column % 8 = half-word (column % 8) of the
//   call.
BU_HD Philox4 row_dropout_bits(RngKey key, uint32_t row, uint32_t column8) {
  return philox4x32_10(column8, row, 0u, key.offset, key.k0, key.k1);
}

// Attention dropout: one call covers the 8 scores that one thread of mma.sync m16n8k16 holds for
// two neighbouring n8 tiles: rows r and r + 8 of a 16-row tile, columns 2t, 2t + 1, 2t + 8, 2t + 9
// of a 16-column tile (t = 0..3).
//   counter = (4 * (column / 16) + t, 8 * (row / 16) + row % 8, 1 + sequence * heads + head,
//   offset) half-word = 4 * (row / 8 % 2) + 2 * (column / 8 % 2) + column % 2
// The sequence-head word starts at 1: 0 is row dropout.
struct AttentionDropoutCoord {
  uint32_t column_word, row_word;
  int half;
};

BU_HD AttentionDropoutCoord attention_dropout_coord(uint32_t row, uint32_t column) {
  return {(column >> 4) * 4 + ((column >> 1) & 3), (row >> 4) * 8 + (row & 7),
          static_cast<int>(((row >> 3) & 1) * 4 + ((column >> 3) & 1) * 2 + (column & 1))};
}

BU_HD Philox4 attention_dropout_bits(RngKey key, uint32_t sequence_head, uint32_t row_word,
                                     uint32_t column_word) {
  return philox4x32_10(column_word, row_word, 1u + sequence_head, key.offset, key.k0, key.k1);
}

// Without indexing by a variable, which would put the words into a GPU's local memory.
BU_HD uint32_t half_word(const Philox4& bits, int half) {
  const uint32_t low = half & 2 ? bits.w[1] : bits.w[0], high = half & 2 ? bits.w[3] : bits.w[2];
  return ((half & 4 ? high : low) >> (16 * (half & 1))) & 0xffffu;
}

}  // namespace bert_unpad
