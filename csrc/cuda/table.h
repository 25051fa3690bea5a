// How a list of tensors gets to a kernel: pointers and sizes are in the params struct, which may
// have 4 KiB on every architecture and driver. So nothing is copied to the device before a launch,
// and a captured graph keeps its own list. A longer list takes several launches.
//
// A block works on one chunk and finds its tensor by bisection.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/macros.h"
#include "cuda/primitives.h"

namespace bert_unpad::cuda {

// A few hundred KiB for each block, and blocks enough for the smallest BERT to fill a GPU.
inline constexpr int64_t kBlockElements = 1 << 14;
inline constexpr int kTableTensors = 64;
// Threads of a block: 8 warps, which sum_over_block adds up.
inline constexpr int kLanesX = 32, kWarpsY = 8, kBlockThreads = kLanesX * kWarpsY;

// Entry: a struct with `int64_t size`.
template <class Entry>
struct Table {
  Entry entries[kTableTensors];
  int first[kTableTensors + 1];  // chunks of the entries before
  int count;
  int first_tensor;  // in the whole list
  int first_chunk;
};

// What a block works on: elements [begin, end) of an entry.
struct Place {
  int entry;
  int64_t begin, end;
};

template <class Entry>
BU_DEVICE Place place_of(const Table<Entry>& table, int chunk) {
  int low = 0, high = table.count;  // first[low] <= chunk < first[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (table.first[middle] <= chunk ? low : high) = middle;
  }
  const int64_t begin = (chunk - table.first[low]) * kBlockElements;
  const int64_t size = table.entries[low].size;
  return {low, begin, begin + kBlockElements < size ? begin + kBlockElements : size};
}

// f.operator()<N>(index) over a place: N elements at once where the tensor is aligned.
template <int N, class F>
BU_DEVICE void for_elements(const Place& at, bool aligned, const F& f) {
  const int64_t thread = threadIdx.y * kLanesX + threadIdx.x;
  const int64_t whole = aligned ? (at.end - at.begin) / N * N : 0;
  for (int64_t j = thread * N; j < whole; j += kBlockThreads * N)
    f.template operator()<N>(at.begin + j);
  for (int64_t j = whole + thread; j < at.end - at.begin; j += kBlockThreads)
    f.template operator()<1>(at.begin + j);
}

inline int64_t chunks_of(int64_t size) { return (size + kBlockElements - 1) / kBlockElements; }

// f(table, chunks) for the whole list, a table at a time; tables without elements too, unless they
// are empty.
template <class Entry, class F>
void for_tables(const std::vector<Entry>& list, const F& f) {
  int first_chunk = 0;
  for (size_t begin = 0; begin < list.size(); begin += kTableTensors) {
    Table<Entry> table{};
    table.count = static_cast<int>(std::min<size_t>(kTableTensors, list.size() - begin));
    table.first_tensor = static_cast<int>(begin);
    table.first_chunk = first_chunk;
    for (int i = 0; i < table.count; ++i) {
      table.entries[i] = list[begin + i];
      table.first[i + 1] = table.first[i] + static_cast<int>(chunks_of(list[begin + i].size));
    }
    f(table, table.first[table.count]);
    first_chunk += table.first[table.count];
  }
}

// All chunks of a list.
template <class Entry>
int64_t total_chunks(const std::vector<Entry>& list) {
  int64_t count = 0;
  for (const Entry& entry : list) count += chunks_of(entry.size);
  return count;
}

}  // namespace bert_unpad::cuda
