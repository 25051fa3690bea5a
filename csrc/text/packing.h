// Copies parts of buffers end to end, in any order: examples of shards, and of a batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>

namespace bert_unpad::text {

// Throws std::invalid_argument unless a part lies in a buffer of `size` values.
inline void check_part(int64_t begin, int64_t length, size_t size) {
  const auto whole = static_cast<int64_t>(size);
  if (length < 0 || begin < 0 || length > whole || begin > whole - length) {
    throw std::invalid_argument("begins, lengths: expected parts of 0 to " + std::to_string(whole) +
                                ", got " + std::to_string(length) + " from " +
                                std::to_string(begin));
  }
}

// Parts of several buffers of values of one type, B of them.
struct Parts {
  std::span<const std::span<const char>> buffers;  // bytes
  size_t item;                                     // bytes of a value
  std::span<const int64_t> buffer, begins, lengths;

  // Throws std::invalid_argument if a part lies in no buffer; returns the sum of the lengths.
  int64_t check() const {
    int64_t total = 0;
    for (size_t b = 0; b < lengths.size(); ++b) {
      if (buffer[b] < 0 || buffer[b] >= static_cast<int64_t>(buffers.size())) {
        throw std::invalid_argument("source: expected 0 to " + std::to_string(buffers.size() - 1) +
                                    ", got " + std::to_string(buffer[b]));
      }
      check_part(begins[b], lengths[b], buffers[buffer[b]].size() / item);
      total += lengths[b];
    }
    return total;
  }

  // Writes all parts, which have been checked.
  void copy_to(char* out) const {
    for (size_t b = 0; b < lengths.size(); ++b) {
      const size_t bytes = lengths[b] * item;
      if (bytes) std::memcpy(out, buffers[buffer[b]].data() + begins[b] * item, bytes);
      out += bytes;
    }
  }
};

// Examples in one buffer of tokens, B of them.
template <typename Token>
struct Examples {
  std::span<const Token> tokens;
  std::span<const int64_t> begins, lengths;
  std::span<const int64_t> second_starts;  // where the second segment begins in each

  // Throws std::invalid_argument if an example lies outside the buffer, or a second segment outside
  // its example; returns the sum of the lengths.
  int64_t check() const {
    int64_t total = 0;
    for (size_t b = 0; b < lengths.size(); ++b) {
      check_part(begins[b], lengths[b], tokens.size());
      if (second_starts[b] < 0 || second_starts[b] > lengths[b]) {
        throw std::invalid_argument("second_starts: expected 0 to " + std::to_string(lengths[b]) +
                                    " (the length), got " + std::to_string(second_starts[b]));
      }
      total += lengths[b];
    }
    return total;
  }

  // Fills both arrays, [sum of lengths], with examples that have been checked.
  void pack(int64_t* input_ids, int64_t* token_type_ids) const {
    for (size_t b = 0; b < lengths.size(); ++b) {
      std::copy_n(tokens.data() + begins[b], lengths[b], input_ids);
      std::fill_n(token_type_ids, second_starts[b], 0);
      std::fill_n(token_type_ids + second_starts[b], lengths[b] - second_starts[b], 1);
      input_ids += lengths[b];
      token_type_ids += lengths[b];
    }
  }
};

}  // namespace bert_unpad::text
