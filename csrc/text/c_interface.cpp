// Work on text and tokens for bert_unpad/_text.py that would be too slow in Python, or keep its
// other threads waiting.
#include <optional>
#include <string_view>

#include "characters.h"
#include "host/c_interface.h"
#include "masking.h"
#include "packing.h"
#include "sentences.h"

namespace bert_unpad::text {
namespace {

using host::Array;
using host::guarded;
using host::hand_over;
using host::Handle;
using host::held;

struct PackArguments {
  Array<int64_t> begins, lengths, second_starts, examples;
  Handle* masker;  // null: nothing is masked
  uint64_t epoch;
  double rate;
};

// `total`: what `input_ids` and `token_type_ids` have room for. The places that are masked, and the
// true ids there, are made.
struct Packed {
  int64_t total;
  int64_t *input_ids, *token_type_ids;
  Handle *positions, *labels;
};

template <typename Token>
int pack(Array<Token> tokens, const PackArguments& given, Packed& packed) {
  return guarded([&] {
    const Examples<Token> examples{tokens.span(), given.begins.span(), given.lengths.span(),
                                   given.second_starts.span()};
    if (examples.check() != packed.total) throw std::logic_error("pack: no room for the result");
    examples.pack(packed.input_ids, packed.token_type_ids);
    MaskedTokens masked;
    if (given.masker) {
      const std::span ids(packed.input_ids, static_cast<size_t>(packed.total));
      masked = held<Masker>(given.masker)
                   .mask(ids, examples.lengths, given.examples.span(), given.epoch, given.rate);
    }
    packed.positions = hand_over(std::move(masked.positions));
    packed.labels = hand_over(std::move(masked.labels));
  });
}

}  // namespace

BERT_UNPAD_API int bu_splitter(Array<char> kinds, Handle** splitter) {
  return guarded([&] {
    *splitter = host::hold(Splitter(std::string(kinds.data, static_cast<size_t>(kinds.size))));
  });
}

BERT_UNPAD_API int bu_split(Handle* splitter, Array<char> text, Array<int64_t> ends,
                            Handle** sentences, Handle** new_ends, Handle** counts) {
  return guarded([&] {
    std::optional<std::span<const int64_t>> spans;
    if (ends.given()) spans = ends.span();
    const std::string_view view(text.data, static_cast<size_t>(text.size));
    Documents documents = held<Splitter>(splitter).split(view, spans);
    *sentences = hand_over(std::move(documents.text));
    *new_ends = hand_over(std::move(documents.ends));
    *counts = hand_over(std::move(documents.counts));
  });
}

BERT_UNPAD_API int bu_characters(Handle** counts) {
  return guarded([&] { *counts = host::hold(CharacterCounts()); });
}

BERT_UNPAD_API int bu_characters_add(Handle* counts, Array<char> text) {
  return guarded(
      [&] { held<CharacterCounts>(counts).add({text.data, static_cast<size_t>(text.size)}); });
}

BERT_UNPAD_API int bu_characters_counts(Handle* counts, Handle** found) {
  return guarded([&] { *found = hand_over(held<CharacterCounts>(counts).counts()); });
}

// The buffers' sizes are in bytes, `total` in values of `item` bytes. Without `out` only counts.
BERT_UNPAD_API int bu_gather(const Array<char>* buffers, int64_t count, int64_t item,
                             Array<int64_t> source, Array<int64_t> begins, Array<int64_t> lengths,
                             int64_t* total, char* out) {
  return guarded([&] {
    std::vector<std::span<const char>> spans;
    for (int64_t i = 0; i < count; ++i) spans.push_back(buffers[i].span());
    const Parts parts{spans, static_cast<size_t>(item), source.span(), begins.span(),
                      lengths.span()};
    if (out) {
      parts.copy_to(out);
    } else {
      *total = parts.check();
    }
  });
}

BERT_UNPAD_API int bu_masker(Array<char> kinds, const MaskingOptions* options, Handle** masker) {
  return guarded([&] {
    std::string copied(kinds.data, static_cast<size_t>(kinds.size));
    *masker = host::hold(Masker(std::move(copied), *options));
  });
}

#define BERT_UNPAD_PACK(name, Token)                                                         \
  BERT_UNPAD_API int name(Array<Token> tokens, const PackArguments* given, Packed* packed) { \
    return pack(tokens, *given, *packed);                                                    \
  }

BERT_UNPAD_PACK(bu_pack_uint16, uint16_t)
BERT_UNPAD_PACK(bu_pack_uint32, uint32_t)
BERT_UNPAD_PACK(bu_pack_int32, int32_t)
BERT_UNPAD_PACK(bu_pack_int64, int64_t)

#undef BERT_UNPAD_PACK

}  // namespace bert_unpad::text
