// Chooses the tokens to predict of a packed batch, and replaces them.
//
// Every decision is SplitMix64's output at the coordinates (seed, epoch, example, position). So a
// mask is the same in any batch, on any rank and thread, and after resuming; none is stored.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bert_unpad::text {

// What is chosen as one. Tokens; whole words; or spans of words of geometric length (Joshi et al.,
// 2020, arXiv:1907.10529).
enum class MaskUnit { kToken, kWord, kSpan };

// What a token id is, as bits of a byte.
inline constexpr uint8_t kMaskable = 1;      // it may be predicted
inline constexpr uint8_t kContinuation = 2;  // it goes on with the word of the token before it
inline constexpr uint8_t kReplacement = 4;   // it may stand for a token that is predicted

inline constexpr int64_t kLongestSequence = 65535;  // tokens; a position takes 16 bits of a key

struct MaskingOptions {
  MaskUnit unit;
  int64_t mask_id;
  int64_t max_predictions;  // of a sequence
  bool always_mask;         // [MASK] for all that is predicted
  uint64_t seed;
};

struct MaskedTokens {
  std::vector<int64_t> positions;  // in the packed buffer, ascending
  std::vector<int64_t> labels;     // the true ids there
};

class Masker {
 public:
  // `kinds`: a byte for each id. Throws std::invalid_argument if the mask id is none, or no id may
  // replace another.
  Masker(std::string kinds, const MaskingOptions& options);

  // Masks the sequences that lie end to end in `ids`, in place. Of a sequence of n tokens
  // round(n * rate) are predicted, at least 1.
  //
  // ids: [T]. lengths: [B], T in all. examples: [B], the coordinate of each sequence.
  // Throws std::invalid_argument if a length is too large or an id is none of the vocabulary.
  MaskedTokens mask(std::span<int64_t> ids, std::span<const int64_t> lengths,
                    std::span<const int64_t> examples, uint64_t epoch, double rate) const;

 private:
  std::string kinds_;
  std::vector<int64_t> replacements_;
  MaskingOptions options_;
};

}  // namespace bert_unpad::text
