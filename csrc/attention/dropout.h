// Attention dropout in the layouts that tensor cores leave scores in.
//
// One Philox call decides on 8 scores (common/philox.h): a forward thread holds exactly these 8 of
// every 16 x 16 tile of scores. In the backward pass tiles are transposed; there two lanes draw one
// call each and exchange halves.
#pragma once

#include "common/philox.h"
#include "cuda/primitives.h"

namespace bert_unpad {

// Bytes of `a` (0 to 3) and `b` (4 to 7) picked by the four nibbles of `selector`.
BU_HD uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  const uint64_t bytes = (static_cast<uint64_t>(b) << 32) | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<uint32_t>((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 0xff) << (8 * i);
  return out;
#endif
}

// Draws the masks of one sequence and head.
struct AttentionDropout {
  RngKey key;
  uint32_t stream;  // sequence * heads + head
  uint32_t threshold, threshold_high;

  // `rng` is read here and not on the host, so that a captured graph can advance it.
  BU_DEVICE AttentionDropout(const int64_t* rng, uint32_t keep, uint32_t sequence_head)
      : key{}, stream(sequence_head), threshold(keep), threshold_high(keep << 16) {
    if (rng != nullptr) key = rng_key(load_global<int64_t>(rng), load_global<int64_t>(rng + 1));
  }

  // Whether there is dropout at all, for kernels that serve both cases.
  BU_DEVICE bool draws() const { return threshold < 65536u; }

  // Is the weight that drew the lower or upper half of a word kept?
  BU_DEVICE bool keeps_low(uint32_t word) const { return (word & 0xffffu) < threshold; }
  BU_DEVICE bool keeps_high(uint32_t word) const { return word < threshold_high; }

  // Is one weight kept? A whole Philox call for it; true without dropout.
  BU_DEVICE bool keeps(int row, int column) const {
    if (threshold == 65536u) return true;
    const AttentionDropoutCoord at = attention_dropout_coord(row, column);
    return half_word(attention_dropout_bits(key, stream, at.row_word, at.column_word), at.half) <
           threshold;
  }

  // Zeroes what is dropped of the 16 x 16 tile of scores at tile row `row16` (queries) and tile
  // column `column16` (keys), in two C tiles side by side.
  BU_DEVICE void apply(float (&weights)[2][4], int row16, int column16) const {
    const uint32_t lane = threadIdx.x % 32;
    const Philox4 bits =
        attention_dropout_bits(key, stream, row16 * 8 + lane / 4, column16 * 4 + lane % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // word i: row g + 8 * (i / 2), columns 2t, 2t + 1 of tile i % 2
      float (&w)[4] = weights[i % 2];
      if (!keeps_low(bits.w[i])) w[2 * (i / 2)] = 0.0f;
      if (!keeps_high(bits.w[i])) w[2 * (i / 2) + 1] = 0.0f;
    }
  }

  // The words of the same tile transposed, where a lane holds keys g, g + 8 and queries 2t, 2t + 1,
  // 2t + 8, 2t + 9.
  // even[query / 8] is of query 2t, odd[query / 8] of query 2t + 1: key g in the lower half, key
  // g + 8 in the upper one.
  struct Transposed {
    uint32_t even[2], odd[2];
  };
  BU_DEVICE Transposed transposed_words(int row16, int column16) const {
    // Lanes with g = 2i and 2i + 1 need the words of queries 2t and 2t + 1 at column word i: the
    // first lane their lower halves, the second one their upper halves. Each draws one of the two.
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, upper = g % 2;
    const Philox4 bits = attention_dropout_bits(key, stream, row16 * 8 + 2 * (lane % 4) + upper,
                                                column16 * 4 + g / 2);
    const uint32_t mine = upper ? 0x7632u : 0x5410u, other = upper ? 0x5410u : 0x7632u;
    const uint32_t keep0 = permute_bytes(bits.w[0], bits.w[1], mine);
    const uint32_t keep1 = permute_bytes(bits.w[2], bits.w[3], mine);
    const uint32_t got0 = shuffle_xor(permute_bytes(bits.w[0], bits.w[1], other), 4);
    const uint32_t got1 = shuffle_xor(permute_bytes(bits.w[2], bits.w[3], other), 4);
    if (upper) return {{got0, got1}, {keep0, keep1}};
    return {{keep0, keep1}, {got0, got1}};
  }
};

}  // namespace bert_unpad
