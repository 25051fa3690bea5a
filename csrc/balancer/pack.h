// Packs sequences into rows of a fixed number of tokens: the other way to avoid padding (Krell et
// al., "Efficient Sequence Packing without Cross-contamination", 2021).
//
// Sequences of one length are interchangeable, so the packing works on how many there are of each
// length, not on single sequences. Its time depends on the number of different lengths and rows; 16
// million sequences take about a second. The longest come first.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace bert_unpad::balancer {

enum class Packing {
  kShortestFirst,  // into the row with the most space left
  kBestFit,        // into the row with the least space left that is enough
};

struct Rows {
  std::vector<uint32_t> indices;  // row after row, longest first in each
  std::vector<int64_t> ends;      // where each row ends in `indices`
};

// Lengths of 1 to `row_tokens`; at most `max_sequences` in a row. Which sequence of a length goes
// where, and the order of the rows, are drawn from the seed. Throws std::invalid_argument.
Rows pack(std::span<const uint16_t> lengths, int64_t row_tokens, int64_t max_sequences,
          Packing packing, uint64_t seed);

}  // namespace bert_unpad::balancer
