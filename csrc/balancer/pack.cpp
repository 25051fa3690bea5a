// See pack.h.
#include "pack.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "rng.h"

namespace bert_unpad::balancer {
namespace {

// `count` rows that hold sequences of the same lengths.
struct Kind {
  int64_t count;
  std::vector<uint16_t> lengths;
};

// The kinds of rows that hold the counted sequences.
class Packer {
 public:
  Packer(int64_t row_tokens, int64_t max_sequences, Packing packing)
      : row_tokens_(row_tokens),
        max_sequences_(max_sequences),
        packing_(packing),
        open_(row_tokens + 1) {}

  // `length` must not be longer than those before.
  void add(int64_t length, int64_t count) {
    while (count > 0) {
      const int64_t space = find(length);
      if (space < 0) return open_rows(length, count);
      Kind& found = open_[space].back();
      const int64_t taken = std::min(count, found.count);
      Kind filled{taken, found.lengths};
      filled.lengths.push_back(static_cast<uint16_t>(length));
      found.count -= taken;
      if (found.count == 0) open_[space].pop_back();
      keep(std::move(filled), space - length);
      count -= taken;
    }
  }

  std::vector<Kind> finish() {
    for (auto& kinds : open_)
      for (Kind& kind : kinds) full_.push_back(std::move(kind));
    return std::move(full_);
  }

 private:
  // The space left in the open rows to add to; -1 if none has enough.
  int64_t find(int64_t length) const {
    if (packing_ == Packing::kBestFit) {
      for (int64_t space = length; space <= row_tokens_; ++space)
        if (!open_[space].empty()) return space;
    } else {
      for (int64_t space = row_tokens_; space >= length; --space)
        if (!open_[space].empty()) return space;
    }
    return -1;
  }

  // A row takes as many of a length as fit before the next is begun.
  void open_rows(int64_t length, int64_t count) {
    const int64_t each = std::min(row_tokens_ / length, max_sequences_);
    const auto open = [&](int64_t rows, int64_t sequences) {
      if (rows > 0 && sequences > 0)
        keep({rows, std::vector<uint16_t>(sequences, static_cast<uint16_t>(length))},
             row_tokens_ - sequences * length);
    };
    open(count / each, each);
    open(1, count % each);
  }

  void keep(Kind kind, int64_t space) {
    const bool full = space == 0 || static_cast<int64_t>(kind.lengths.size()) == max_sequences_;
    (full ? full_ : open_[space]).push_back(std::move(kind));
  }

  int64_t row_tokens_, max_sequences_;
  Packing packing_;
  std::vector<std::vector<Kind>> open_;  // by space left
  std::vector<Kind> full_;
};

}  // namespace

Rows pack(std::span<const uint16_t> lengths, int64_t row_tokens, int64_t max_sequences,
          Packing packing, uint64_t seed) {
  if (row_tokens < 1 || row_tokens > UINT16_MAX)
    throw std::invalid_argument("row_tokens: expected 1 to 65,535");
  if (max_sequences < 1) throw std::invalid_argument("max_sequences: expected 1 or more");
  std::vector<std::vector<uint32_t>> of_length(row_tokens + 1);
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 1 || lengths[i] > row_tokens) {
      throw std::invalid_argument("lengths: expected 1 to " + std::to_string(row_tokens) +
                                  " (row_tokens), got " + std::to_string(lengths[i]));
    }
    of_length[lengths[i]].push_back(static_cast<uint32_t>(i));
  }
  Rng rng({seed});
  Packer packer(row_tokens, max_sequences, packing);
  for (int64_t length = row_tokens; length > 0; --length) {
    rng.shuffle(std::span(of_length[length]));
    packer.add(length, static_cast<int64_t>(of_length[length].size()));
  }

  const std::vector<Kind> kinds = packer.finish();
  std::vector<uint32_t> kind_of_row;
  for (size_t k = 0; k < kinds.size(); ++k)
    kind_of_row.insert(kind_of_row.end(), kinds[k].count, static_cast<uint32_t>(k));
  rng.shuffle(std::span(kind_of_row));
  Rows rows;
  rows.indices.reserve(lengths.size());
  rows.ends.reserve(kind_of_row.size());
  for (uint32_t k : kind_of_row) {
    for (uint16_t length : kinds[k].lengths) {
      rows.indices.push_back(of_length[length].back());
      of_length[length].pop_back();
    }
    rows.ends.push_back(static_cast<int64_t>(rows.indices.size()));
  }
  return rows;
}

}  // namespace bert_unpad::balancer
