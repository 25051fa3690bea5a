#include "masking.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "common/splitmix64.h"

namespace bert_unpad::text {
namespace {

// Of 2^32 random numbers, those below the first make a predicted token [MASK] (80 %), the next ones
// another token (10 %); it stays with the others (Devlin et al., 2019, arXiv:1810.04805).
constexpr uint64_t kMasked = 3435973836;
constexpr uint64_t kReplaced = 3865470566;

constexpr int kLongestSpan = 10;  // words

constexpr uint64_t power(uint64_t base, int exponent) {
  return exponent == 0 ? 1 : base * power(base, exponent - 1);
}

// Of 2^32 random numbers, those below entry i make a span of at most i + 1 words: a geometric
// distribution with p = 0.2, of which lengths above the greatest are left out.
constexpr auto kSpanLengths = [] {
  std::array<uint64_t, kLongestSpan - 1> ends{};
  for (int n = 1; n < kLongestSpan; ++n) {
    const uint64_t below = power(5, kLongestSpan) - power(4, n) * power(5, kLongestSpan - n);
    ends[n - 1] = (below << 32) / (power(5, kLongestSpan) - power(4, kLongestSpan));
  }
  return ends;
}();

struct Word {
  uint32_t begin, end;  // positions
  uint32_t run;         // which run of tokens without a special one between them
};

// A token to predict, and the token whose random number says what becomes of it.
struct Choice {
  uint32_t position, deciding;
};

// Chooses tokens of one sequence after the other; keeps its buffers between them.
class Chooser {
 public:
  explicit Chooser(const std::string& kinds) : kinds_(kinds) {}

  // Sets the sequence: true ids, and where its random numbers begin.
  void begin(std::span<const int64_t> ids, uint64_t state) {
    ids_ = ids;
    hashes_.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) hashes_[i] = splitmix64(state + i * kSplitMixGamma);
    choices_.clear();
  }

  uint64_t hash(uint32_t position) const { return hashes_[position]; }

  // Each of these chooses `quota` tokens, or as many as there are; the result is ascending.

  std::span<const Choice> tokens(size_t quota) {
    keys_.clear();
    for (uint32_t i = 0; i < ids_.size(); ++i) {
      if (is(kMaskable, i)) keys_.push_back(key(i));
    }
    quota = std::min(quota, keys_.size());
    if (quota < keys_.size()) {
      std::nth_element(keys_.begin(), keys_.begin() + quota, keys_.end());
    }
    for (size_t i = 0; i < quota; ++i) choose(static_cast<uint32_t>(keys_[i] & 0xffff));
    return ascending();
  }

  // Words in random order, each that still fits. If none fits, the first one, cut to `most`.
  std::span<const Choice> words(size_t quota, size_t most) {
    order_words();
    size_t left = quota;
    for (const auto& [_, index] : order_) {
      const Word& word = words_[index];
      const size_t size = word.end - word.begin;
      if (size > left) continue;
      for (uint32_t i = word.begin; i < word.end; ++i) choose(i);
      left -= size;
    }
    if (choices_.empty() && !order_.empty()) {
      const Word& word = words_[order_[0].second];
      const size_t size = std::min<size_t>(word.end - word.begin, most);
      for (uint32_t i = word.begin; i < word.begin + size; ++i) choose(i);
    }
    return ascending();
  }

  // Spans that begin at words in random order, until there are enough tokens. The first word of a
  // span decides for all of its tokens.
  std::span<const Choice> spans(size_t quota) {
    order_words();
    covered_.assign(words_.size(), 0);
    for (const auto& [_, first] : order_) {
      const uint32_t head = words_[first].begin;
      const uint64_t draw = splitmix64(~hashes_[head]) >> 32;
      const auto length =
          std::upper_bound(kSpanLengths.begin(), kSpanLengths.end(), draw) - kSpanLengths.begin();
      const size_t last = std::min<size_t>(first + length, words_.size() - 1);
      for (size_t w = first; w <= last && words_[w].run == words_[first].run; ++w) {
        if (std::exchange(covered_[w], 1)) continue;
        for (uint32_t i = words_[w].begin; i < words_[w].end; ++i) {
          if (choices_.size() == quota) return ascending();
          choices_.push_back({i, head});
        }
      }
    }
    return ascending();
  }

 private:
  bool is(uint8_t kind, uint32_t position) const {
    return static_cast<uint8_t>(kinds_[ids_[position]]) & kind;
  }

  // Random, and unlike that of any other token of the sequence.
  uint64_t key(uint32_t position) const { return hashes_[position] >> 40 << 16 | position; }

  void choose(uint32_t position) { choices_.push_back({position, position}); }

  std::span<const Choice> ascending() {
    std::ranges::sort(choices_, {}, &Choice::position);
    return choices_;
  }

  // Words and their random order. A continuation whose beginning was cut off begins a word itself.
  void order_words() {
    words_.clear();
    order_.clear();
    uint32_t run = 0;
    for (uint32_t i = 0; i < ids_.size(); ++i) {
      if (!is(kMaskable, i)) continue;
      const bool begins_run = i == 0 || !is(kMaskable, i - 1);
      run += begins_run;
      if (begins_run || !is(kContinuation, i)) {
        order_.emplace_back(key(i), static_cast<uint32_t>(words_.size()));
        words_.push_back({i, i, run});
      }
      words_.back().end = i + 1;
    }
    std::ranges::sort(order_);
  }

  const std::string& kinds_;
  std::span<const int64_t> ids_;
  std::vector<uint64_t> hashes_, keys_;
  std::vector<Word> words_;
  std::vector<std::pair<uint64_t, uint32_t>> order_;  // (key, word), ascending
  std::vector<uint8_t> covered_;                      // by word
  std::vector<Choice> choices_;
};

void check_ids(std::span<const int64_t> ids, size_t vocabulary) {
  for (const int64_t id : ids) {
    if (static_cast<uint64_t>(id) >= vocabulary) {
      throw std::invalid_argument("tokens: expected ids of 0 to " + std::to_string(vocabulary - 1) +
                                  ", got " + std::to_string(id));
    }
  }
}

}  // namespace

Masker::Masker(std::string kinds, const MaskingOptions& options)
    : kinds_(std::move(kinds)), options_(options) {
  for (size_t id = 0; id < kinds_.size(); ++id) {
    if (kinds_[id] & kReplacement) replacements_.push_back(static_cast<int64_t>(id));
  }
  if (replacements_.empty()) throw std::invalid_argument("kinds: expected ids that may replace");
  check_ids({&options_.mask_id, 1}, kinds_.size());
}

MaskedTokens Masker::mask(std::span<int64_t> ids, std::span<const int64_t> lengths,
                          std::span<const int64_t> examples, uint64_t epoch, double rate) const {
  check_ids(ids, kinds_.size());
  const uint64_t of_epoch = splitmix64(splitmix64(options_.seed) + epoch);
  const uint64_t masked_below = options_.always_mask ? uint64_t{1} << 32 : kMasked;
  MaskedTokens out;
  Chooser chooser(kinds_);
  size_t begin = 0;
  for (size_t b = 0; b < lengths.size(); begin += lengths[b++]) {
    if (lengths[b] > kLongestSequence) {
      throw std::invalid_argument("lengths: expected at most " + std::to_string(kLongestSequence) +
                                  ", got " + std::to_string(lengths[b]));
    }
    const auto sequence = ids.subspan(begin, lengths[b]);
    const auto example = static_cast<uint64_t>(examples[b]);
    chooser.begin(sequence, splitmix64(of_epoch + example * kSplitMixGamma));
    // llrint rounds halves to even numbers, as Python's round() does, which the original uses.
    const int64_t wanted = std::max<int64_t>(std::llrint(lengths[b] * rate), 1);
    const auto most = static_cast<size_t>(options_.max_predictions);
    const size_t quota = std::min(static_cast<size_t>(wanted), most);
    const auto choices = options_.unit == MaskUnit::kToken  ? chooser.tokens(quota)
                         : options_.unit == MaskUnit::kWord ? chooser.words(quota, most)
                                                            : chooser.spans(quota);
    for (const auto [position, deciding] : choices) {
      int64_t& id = sequence[position];
      out.positions.push_back(static_cast<int64_t>(begin + position));
      out.labels.push_back(id);
      const uint64_t action = splitmix64(chooser.hash(deciding) ^ kSplitMixGamma) >> 32;
      const uint64_t draw = splitmix64(chooser.hash(position) ^ kSplitMixGamma) & 0xffffffff;
      if (action < masked_below) {
        id = options_.mask_id;
      } else if (action < kReplaced) {
        id = replacements_[draw * replacements_.size() >> 32];
      }
    }
  }
  return out;
}

}  // namespace bert_unpad::text
