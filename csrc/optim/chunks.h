// Lists of tensors as chunks of a fixed size, for the CPU bindings: work that any number of threads
// shares evenly, with sums by chunk whose bits do not depend on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace bert_unpad {

// 128 KiB of fp32: a chunk of every array of an update fits in a core's second-level cache.
inline constexpr int64_t kChunk = 1 << 15;

struct Chunk {
  int64_t tensor, begin, end;
};

// All chunks in order; `first` (if wanted) gets each tensor's first chunk, and their number last.
template <class Tensors>
std::vector<Chunk> chunks_of(const Tensors& tensors, std::vector<int64_t>* first = nullptr) {
  std::vector<Chunk> chunks;
  int64_t number = 0;
  for (const auto& t : tensors) {
    if (first) first->push_back(static_cast<int64_t>(chunks.size()));
    for (int64_t begin = 0; begin < t.size; begin += kChunk)
      chunks.push_back({number, begin, std::min(t.size, begin + kChunk)});
    ++number;
  }
  if (first) first->push_back(static_cast<int64_t>(chunks.size()));
  return chunks;
}

}  // namespace bert_unpad
