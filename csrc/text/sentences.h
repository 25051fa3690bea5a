// Splits documents into sentences and reduces their white space to single spaces.
//
// Text is UTF-8. A blank line ends a sentence; other line breaks are white space. A sentence also
// ends at . ! or ? (and closing quotes) before white space and something that can begin a sentence,
// unless a known abbreviation or an initial ends there, and at a CJK full stop.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bert_unpad::text {

// What a code point is, as bits of a byte.
inline constexpr uint8_t kAlphanumeric = 1;
inline constexpr uint8_t kUppercase = 2;

// Longer sentences are cut, at a space where there is one. Tokenizers take time and memory in
// proportion to a sentence many times over.
inline constexpr size_t kLongestSentence = 16384;  // bytes

struct Documents {
  std::string text;             // sentences, each followed by a line feed
  std::vector<int64_t> ends;    // where each document ends in `text`
  std::vector<int64_t> counts;  // sentences of each document, at least one
};

class Splitter {
 public:
  // One byte for each code point from 0 on.
  explicit Splitter(std::string kinds) : kinds_(std::move(kinds)) {}

  // Documents end at `ends`, which rise up to the size of the text; without them, at blank lines.
  // Documents without text are left out.
  Documents split(std::string_view text, std::optional<std::span<const int64_t>> ends) const;

 private:
  void split_document(std::string_view text, bool blank_line_ends, Documents& out) const;
  bool ends_sentence(std::string_view word) const;
  bool can_begin(std::string_view word) const;
  uint8_t kind_at(std::string_view text, size_t at) const;

  std::string kinds_;
};

}  // namespace bert_unpad::text
