// Python module bert_unpad._text: work on text that would be too slow in Python. Releases the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "characters.h"
#include "sentences.h"

namespace py = pybind11;

namespace bert_unpad::text {
namespace {

using Ends = py::array_t<int64_t, py::array::c_style>;

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
  if (ends) {
    if (!py::isinstance<Ends>(*ends) || ends->ndim() != 1) {
      throw py::type_error("ends: expected a contiguous one-dimensional array of int64");
    }
    spans.emplace(static_cast<const int64_t*>(ends->data()), static_cast<size_t>(ends->size()));
  }
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
  m.doc() = "Text work of bert_unpad: sentences, and counts of characters.";
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
}

}  // namespace bert_unpad::text
