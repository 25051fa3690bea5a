// A long array in chunks, over threads, for the CPU bindings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/parallel.h"

namespace bert_unpad {

// A pure function of the array's size, so that sums do not depend on threads. Within a chunk a lane
// adds up 256 squares or so, which loses 1e-6 of the sum; chunks add up in fp64.
inline constexpr int64_t kArrayChunk = 16384;

inline int64_t array_chunks(int64_t size) { return (size + kArrayChunk - 1) / kArrayChunk; }

// fn(i, begin, end) for chunk i of an array.
template <class F>
void for_chunks(int64_t size, const F& fn) {
  parallel_for(0, array_chunks(size), 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      fn(i, i * kArrayChunk, std::min(size, (i + 1) * kArrayChunk));
  });
}

// The sum of fn(begin, end) over an array's chunks.
template <class F>
double sum_over_chunks(int64_t size, const F& fn) {
  std::vector<float> partials(array_chunks(size));
  for_chunks(size, [&](int64_t i, int64_t begin, int64_t end) { partials[i] = fn(begin, end); });
  double sum = 0.0;
  for (float partial : partials) sum += partial;
  return sum;
}

}  // namespace bert_unpad
