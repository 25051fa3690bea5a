// Counts how often each character occurs in UTF-8 text.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace bert_unpad::text {

class CharacterCounts {
 public:
  // Bytes that are no UTF-8 may be counted as any character.
  void add(std::string_view text) {
    for (size_t at = 0; at < text.size();) {
      const auto first = static_cast<uint8_t>(text[at++]);
      if (first < 0x80) {
        ++counts_[first];
        continue;
      }
      const int more = first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
      uint32_t code = first & (0x3F >> more);
      for (int i = 0; i < more && at < text.size(); ++i) {
        code = code << 6 | (static_cast<uint8_t>(text[at++]) & 0x3F);
      }
      ++counts_[code < kCodes ? code : 0];
    }
  }

  // By code point.
  const std::vector<int64_t>& counts() const { return counts_; }

 private:
  static constexpr uint32_t kCodes = 0x110000;

  std::vector<int64_t> counts_ = std::vector<int64_t>(kCodes);
};

}  // namespace bert_unpad::text
