// Python module bert_unpad._text: work on text and tokens that would be too slow in Python, or keep
// its other threads waiting. Releases the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "characters.h"
#include "masking.h"
#include "packing.h"
#include "sentences.h"

namespace py = pybind11;

namespace bert_unpad::text {
namespace {

template <typename T>
bool is_vector_of(const py::array& array) {
  return py::isinstance<py::array_t<T, py::array::c_style>>(array) && array.ndim() == 1;
}

template <typename T>
std::span<const T> view(const py::array& array) {
  return {static_cast<const T*>(array.data()), static_cast<size_t>(array.size())};
}

std::span<const int64_t> int64_view(const py::array& array, const char* name) {
  if (!is_vector_of<int64_t>(array)) {
    throw py::type_error(std::string(name) +
                         ": expected a contiguous one-dimensional array of int64");
  }
  return view<int64_t>(array);
}

py::array_t<int64_t> to_numpy(std::vector<int64_t>&& values) {
  auto owned = std::make_unique<std::vector<int64_t>>(std::move(values));
  const auto size = static_cast<py::ssize_t>(owned->size());
  int64_t* data = owned->data();
  py::capsule owner(owned.release(), [](void* p) { delete static_cast<std::vector<int64_t>*>(p); });
  return py::array_t<int64_t>({size}, data, owner);
}

py::tuple split(const Splitter& splitter, const py::bytes& text,
                const std::optional<py::array>& ends) {
  std::optional<std::span<const int64_t>> spans;
  if (ends) spans = int64_view(*ends, "ends");
  const std::string_view view(text);
  Documents documents;
  {
    py::gil_scoped_release release;
    documents = splitter.split(view, spans);
  }
  return py::make_tuple(py::bytes(documents.text), to_numpy(std::move(documents.ends)),
                        to_numpy(std::move(documents.counts)));
}

void add(CharacterCounts& counts, const py::bytes& text) {
  const std::string_view view(text);
  py::gil_scoped_release release;
  counts.add(view);
}

void check_equal_sizes(std::initializer_list<std::span<const int64_t>> arrays, const char* names) {
  for (const auto array : arrays) {
    if (array.size() != arrays.begin()->size()) {
      throw std::invalid_argument(std::string(names) + ": expected equal sizes");
    }
  }
}

py::array gather(const std::vector<py::array>& sources, const py::array& source,
                 const py::array& begins, const py::array& lengths) {
  if (sources.empty()) throw std::invalid_argument("sources: expected at least one, got none");
  const py::dtype dtype = sources[0].dtype();
  std::vector<std::span<const char>> buffers;
  for (const py::array& one : sources) {
    const bool flat = one.ndim() == 1 && (one.flags() & py::array::c_style);
    if (!flat || !one.dtype().equal(dtype) || dtype.kind() == 'O' || dtype.itemsize() == 0) {
      throw py::type_error("sources: expected contiguous one-dimensional arrays of one dtype");
    }
    buffers.emplace_back(static_cast<const char*>(one.data()), one.nbytes());
  }
  const Parts parts{buffers, static_cast<size_t>(dtype.itemsize()), int64_view(source, "source"),
                    int64_view(begins, "begins"), int64_view(lengths, "lengths")};
  check_equal_sizes({parts.buffer, parts.begins, parts.lengths}, "source, begins, lengths");
  py::array out(dtype, std::vector<py::ssize_t>{parts.check()});
  auto* to = static_cast<char*>(out.mutable_data());
  {
    py::gil_scoped_release release;
    parts.copy_to(to);
  }
  return out;
}

template <typename Token>
py::tuple pack_tokens(const Examples<Token>& examples, const Masker* masker,
                      std::span<const int64_t> coordinates, uint64_t epoch, double rate) {
  const int64_t total = examples.check();
  py::array_t<int64_t> input_ids(total), token_type_ids(total);
  const std::span ids(input_ids.mutable_data(), static_cast<size_t>(total));
  int64_t* types = token_type_ids.mutable_data();
  MaskedTokens masked;
  {
    py::gil_scoped_release release;
    examples.pack(ids.data(), types);
    if (masker) masked = masker->mask(ids, examples.lengths, coordinates, epoch, rate);
  }
  return py::make_tuple(input_ids, token_type_ids, to_numpy(std::move(masked.positions)),
                        to_numpy(std::move(masked.labels)));
}

py::tuple pack(const py::array& tokens, const py::array& begins, const py::array& lengths,
               const py::array& second_starts, const Masker* masker,
               const std::optional<py::array>& examples, uint64_t epoch, double rate) {
  if (examples.has_value() != (masker != nullptr)) {
    throw std::invalid_argument("masker and examples: expected both or none, got one");
  }
  const auto from = int64_view(begins, "begins"), sizes = int64_view(lengths, "lengths");
  const auto second = int64_view(second_starts, "second_starts");
  const auto coordinates = examples ? int64_view(*examples, "examples") : sizes;
  check_equal_sizes({from, sizes, second, coordinates}, "begins, lengths, second_starts, examples");
  const auto pack_as = [&]<typename Token>(Token) {
    const Examples<Token> found{view<Token>(tokens), from, sizes, second};
    return pack_tokens(found, masker, coordinates, epoch, rate);
  };
  if (is_vector_of<uint16_t>(tokens)) return pack_as(uint16_t{});
  if (is_vector_of<uint32_t>(tokens)) return pack_as(uint32_t{});
  if (is_vector_of<int32_t>(tokens)) return pack_as(int32_t{});
  if (is_vector_of<int64_t>(tokens)) return pack_as(int64_t{});
  throw py::type_error(
      "tokens: expected a contiguous one-dimensional array of uint16, uint32, int32 or int64");
}

std::unique_ptr<Masker> make_masker(const py::bytes& kinds, const std::string& unit,
                                    int64_t mask_id, std::optional<int64_t> max_predictions,
                                    bool always_mask, uint64_t seed) {
  MaskingOptions options{MaskUnit::kToken, mask_id, 0, always_mask, seed};
  if (unit == "word" || unit == "span") {
    options.unit = unit == "word" ? MaskUnit::kWord : MaskUnit::kSpan;
  } else if (unit != "token") {
    throw std::invalid_argument("unit: expected 'token', 'word' or 'span', got '" + unit + "'");
  }
  options.max_predictions = max_predictions.value_or(std::numeric_limits<int64_t>::max());
  if (options.max_predictions < 1) {
    throw std::invalid_argument("max_predictions: expected 1 or more, got " +
                                std::to_string(options.max_predictions));
  }
  return std::make_unique<Masker>(std::string(kinds), options);
}

constexpr char kMaskerDoc[] = R"(Chooses the tokens to predict; see `bert_unpad.data.TokenMasker`.

kinds: bytes, for each id 1 if it may be predicted, + 2 if it continues a word, + 4 if it may replace
another. unit: "token", "word" or "span". max_predictions: of a sequence; None: no limit.
always_mask: whether all that is predicted becomes mask_id. ValueError names the bad argument.)";

constexpr char kGatherDoc[] = R"(Copies parts of several arrays, one after the other.

sources: list of contiguous arrays of one dtype, perhaps memory-mapped. source, begins, lengths: int64
[B], the array of each part, where the part begins in it, and how many values it has. Returns an array
[sum of lengths]. ValueError or TypeError names the bad argument.)";

constexpr char kPackDoc[] = R"(Packs examples end to end, and masks them.

tokens: uint16, uint32, int32 or int64 [N], a buffer that holds the examples. begins, lengths,
second_starts: int64 [B], where each example begins in it, its number of tokens, and where its second
segment begins in the example. masker, examples: a `Masker` and int64 [B], the coordinate of each
example; without them nothing is masked. epoch, rate: coordinate of the pass over the data, and share
of the tokens to predict. Returns (input_ids, token_type_ids, positions, labels): int64 [T] twice,
then int64 [M], the packed places to predict, ascending, and the true ids there. A pure function.
ValueError or TypeError names the bad argument.)";

constexpr char kSplitterDoc[] = R"(Splits documents into sentences.

kinds: bytes, for each code point from 0 on 1 if it is a letter or digit, + 2 if it is upper
case.)";

constexpr char kSplitDoc[] = R"(Splits UTF-8 text into documents and these into sentences.

text: bytes. ends: int64 [D], where each document ends in it, rising; None: a blank line ends a
document. Returns (text, ends, counts): bytes, each sentence followed by a line feed, white space
reduced to single spaces; int64 [documents], where each document ends in it, and how many sentences
it has. Documents without text are left out. ValueError or TypeError names the bad argument.)";

}  // namespace

PYBIND11_MODULE(_text, m) {
  m.doc() = "Text work of bert_unpad: sentences, counts of characters, masked and packed tokens.";
  py::class_<Splitter>(m, "Splitter", kSplitterDoc)
      .def(py::init([](const py::bytes& kinds) { return Splitter(std::string(kinds)); }),
           py::arg("kinds"))
      .def("split", &split, py::arg("text"), py::arg("ends") = py::none(), kSplitDoc);
  py::class_<CharacterCounts>(m, "CharacterCounts", "How often each character occurs in texts.")
      .def(py::init<>())
      .def("add", &add, py::arg("text"), "Counts the characters of UTF-8 text (bytes).")
      .def(
          "counts",
          [](const CharacterCounts& counts) { return to_numpy(std::vector(counts.counts())); },
          "How often each code point has occurred, int64 [1,114,112].");
  py::class_<Masker>(m, "Masker", kMaskerDoc)
      .def(py::init(&make_masker), py::arg("kinds"), py::kw_only(), py::arg("unit"),
           py::arg("mask_id"), py::arg("max_predictions"), py::arg("always_mask"), py::arg("seed"));
  m.def("gather", &gather, py::arg("sources"), py::arg("source"), py::arg("begins"),
        py::arg("lengths"), kGatherDoc);
  m.def("pack", &pack, py::arg("tokens"), py::arg("begins"), py::arg("lengths"),
        py::arg("second_starts"), py::kw_only(), py::arg("masker") = py::none(),
        py::arg("examples") = py::none(), py::arg("epoch") = 0, py::arg("rate") = 0.0, kPackDoc);
}

}  // namespace bert_unpad::text
