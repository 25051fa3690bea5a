// Sums of chunks over a tensor.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "cuda/reduce.h"
#include "cuda/table.h"

namespace bert_unpad::cuda {

// out[t * width + k] = sum over the chunks of tensor t of partials[chunk * width + k]; square roots
// of them with `root`. `ends[t]` is the chunk after the last one of tensor t. Width: 1 or
// kTensorSums.
void sum_chunks(const char* op, const float* partials, int width, const std::vector<int>& ends,
                bool root, float* out, cudaStream_t stream);

template <class Entry>
std::vector<int> chunk_ends(const std::vector<Entry>& list) {
  std::vector<int> ends;
  for (const Entry& entry : list)
    ends.push_back((ends.empty() ? 0 : ends.back()) + static_cast<int>(chunks_of(entry.size)));
  return ends;
}

}  // namespace bert_unpad::cuda
