// Sums of neighbouring columns over rows in global memory.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "cuda/vector.h"

namespace bert_unpad {

// Adds `count` rows, in order, to the sums of N neighbouring columns; row(i) is where these begin.
// Loads of kInFlight rows are started together.
template <int kInFlight, int N, class Count, class RowAt>
BU_DEVICE void sum_rows(float (&sum)[N], Count count, const RowAt& row BU_SITE) {
  for (Count first = 0; first < count; first += kInFlight) {
    Vector<float, N> x[kInFlight];
#pragma unroll
    for (int r = 0; r < kInFlight; ++r)
      if (first + r < count) x[r] = load_vector<float, N>(row(first + r) BU_FROM_SITE);
#pragma unroll
    for (int r = 0; r < kInFlight; ++r) {
      if (first + r >= count) break;
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += x[r].v[i];
    }
  }
}

}  // namespace bert_unpad
