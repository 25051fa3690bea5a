#include "sentences.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace bert_unpad::text {
namespace {

constexpr std::string_view kOpening = "\"'([`*<-";
constexpr std::string_view kClosing = "\"')]";
constexpr std::string_view kBeforeAbbreviation = "\"'([";

constexpr std::array<std::string_view, 22> kAbbreviations = {
    "al", "approx", "cf", "dr", "e.g",  "eq",   "fig", "figs", "i.e", "inc", "jr",
    "mr", "mrs",    "ms", "no", "prof", "resp", "sec", "sr",   "st",  "vol", "vs"};
// U+3002, U+FF01, U+FF1F: full stop, exclamation mark, question mark.
constexpr std::array<std::string_view, 3> kWideStops = {"\u3002", "\uff01", "\uff1f"};
constexpr std::array<std::string_view, 5> kWideClosing = {"\"", "'", "\u201d", "\u300d", "\uff09"};

// Bytes of the white space that `text` has at `at`; 0 for anything else. What is white space is
// what Python's str.split takes for it.
size_t space_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) {
    return at + i < text.size() ? static_cast<uint8_t>(text[at + i]) : uint8_t{0};
  };
  const uint8_t first = byte(0);
  if (first < 0x80) return (first >= 9 && first <= 13) || (first >= 28 && first <= 32);
  if (first == 0xC2) return byte(1) == 0x85 || byte(1) == 0xA0 ? 2 : 0;
  if (first < 0xE1 || first > 0xE3) return 0;
  const int rest = byte(1) << 8 | byte(2);
  const bool space = first == 0xE1   ? rest == 0x9A80
                     : first == 0xE3 ? rest == 0x8080
                                     : (rest >= 0x8080 && rest <= 0x808A) || rest == 0x80A8 ||
                                           rest == 0x80A9 || rest == 0x80AF || rest == 0x819F;
  return space ? 3 : 0;
}

template <size_t N>
size_t starts_with_any(std::string_view text, size_t at,
                       const std::array<std::string_view, N>& of) {
  for (const std::string_view one : of) {
    if (text.compare(at, one.size(), one) == 0) return one.size();
  }
  return 0;
}

// Where a wide stop in `word` ends, with its closing quotes; npos if there is none from `at` on.
size_t after_wide_stop(std::string_view word, size_t at) {
  for (; at < word.size(); ++at) {
    const auto first = static_cast<uint8_t>(word[at]);
    if (first != 0xE3 && first != 0xEF) continue;
    if (size_t size = starts_with_any(word, at, kWideStops)) {
      do {
        at += size;
        size = at < word.size() ? starts_with_any(word, at, kWideClosing) : 0;
      } while (size);
      return at;
    }
  }
  return std::string_view::npos;
}

bool is_continuation_byte(char byte) { return (static_cast<uint8_t>(byte) & 0xC0) == 0x80; }

// Reads words one after the other.
struct Words {
  std::string_view text;
  size_t at = 0;
  int line_feeds = 0;  // in the white space before the word that was read last

  // The next word; empty at the end.
  std::string_view next() {
    line_feeds = 0;
    while (at < text.size()) {
      const size_t size = space_at(text, at);
      if (!size) break;
      line_feeds += text[at] == '\n';
      at += size;
    }
    const size_t begin = at;
    while (at < text.size() && !space_at(text, at)) ++at;
    return text.substr(begin, at - begin);
  }
};

// Appends words to the sentence that is being written.
class Writer {
 public:
  explicit Writer(Documents& out) : out_(out), begin_(out.text.size()) {}

  // `part` belongs to the word before if `joined`.
  void add(std::string_view part, bool joined) {
    while (!part.empty()) {
      const size_t size = out_.text.size() - begin_;
      if (size && size + 1 + part.size() > kLongestSentence) end_sentence();
      if (out_.text.size() > begin_ && !joined) out_.text += ' ';
      size_t take = std::min(part.size(), kLongestSentence);
      while (take < part.size() && is_continuation_byte(part[take])) ++take;
      out_.text += part.substr(0, take);
      part.remove_prefix(take);
      joined = true;
    }
  }

  void end_sentence() {
    if (out_.text.size() == begin_) return;
    out_.text += '\n';
    begin_ = out_.text.size();
    ++sentences_;
  }

  void end_document() {
    end_sentence();
    if (!sentences_) return;
    out_.ends.push_back(static_cast<int64_t>(begin_));
    out_.counts.push_back(sentences_);
    sentences_ = 0;
  }

 private:
  Documents& out_;
  size_t begin_;  // of the sentence
  int64_t sentences_ = 0;
};

}  // namespace

uint8_t Splitter::kind_at(std::string_view text, size_t at) const {
  const auto first = static_cast<uint8_t>(text[at]);
  const int more = first < 0x80 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
  size_t code = more ? first & (0x3F >> more) : first;
  for (int i = 1; i <= more; ++i) {
    if (at + i >= text.size()) return 0;
    code = code << 6 | (static_cast<uint8_t>(text[at + i]) & 0x3F);
  }
  return code < kinds_.size() ? static_cast<uint8_t>(kinds_[code]) : uint8_t{0};
}

bool Splitter::can_begin(std::string_view word) const {
  const size_t at = word.find_first_not_of(kOpening);
  if (at == std::string_view::npos || (word[at] >= 'a' && word[at] <= 'z')) return false;
  return kind_at(word, at) & kAlphanumeric;
}

bool Splitter::ends_sentence(std::string_view word) const {
  const size_t last = word.find_last_not_of(kClosing);
  if (last == std::string_view::npos) return false;
  if (word[last] == '!' || word[last] == '?') return true;
  if (word[last] != '.') return false;
  std::string_view before = word.substr(0, last);
  before.remove_prefix(std::min(before.find_first_not_of(kBeforeAbbreviation), before.size()));
  if (before.empty()) return true;
  const auto first = static_cast<uint8_t>(before[0]);
  const size_t one = first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  if (before.size() == one && before != "I" && (kind_at(before, 0) & kUppercase)) return false;
  std::string lower(before);
  for (char& c : lower) c += c >= 'A' && c <= 'Z' ? 'a' - 'A' : 0;
  return std::find(kAbbreviations.begin(), kAbbreviations.end(), lower) == kAbbreviations.end();
}

void Splitter::split_document(std::string_view text, bool blank_line_ends, Documents& out) const {
  Words words{text};
  Writer writer(out);
  std::string_view word = words.next();
  while (!word.empty()) {
    size_t begin = 0;
    for (size_t end; (end = after_wide_stop(word, begin)) != std::string_view::npos; begin = end) {
      writer.add(word.substr(begin, end - begin), begin > 0);
      writer.end_sentence();
    }
    writer.add(word.substr(begin), begin > 0);
    const std::string_view next = words.next();
    if (words.line_feeds > 1) {
      blank_line_ends ? writer.end_document() : writer.end_sentence();
    } else if (!next.empty() && can_begin(next) && ends_sentence(word)) {
      writer.end_sentence();
    }
    word = next;
  }
  writer.end_document();
}

Documents Splitter::split(std::string_view text,
                          std::optional<std::span<const int64_t>> ends) const {
  Documents out;
  out.text.reserve(text.size() + 1);
  if (!ends) {
    split_document(text, true, out);
    return out;
  }
  size_t begin = 0;
  for (const int64_t end : *ends) {
    if (end < static_cast<int64_t>(begin) || end > static_cast<int64_t>(text.size())) {
      throw std::invalid_argument("ends: expected ends that rise to at most " +
                                  std::to_string(text.size()) + ", got " + std::to_string(end));
    }
    split_document(text.substr(begin, end - begin), false, out);
    begin = end;
  }
  return out;
}

}  // namespace bert_unpad::text
