// Cross-entropy of masked tokens on a GPU: what the binding hands to the kernels. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"

namespace bert_unpad::cuda {

// One row's part of the results.
struct alignas(8) RowLoss {
  float loss;
  uint32_t correct;  // 0 or 1
};

// Logits are [rows, columns], contiguous, of `dtype`; only the first `vocab` columns count.
struct LossCudaParams {
  DType dtype;
  int64_t rows;
  int columns, vocab;
  int64_t ignore_index;
  const void* logits;
  const int64_t* labels;
  float* lse;  // [rows]; 0 where the row is ignored
  // Forward pass.
  RowLoss* row_losses;  // [rows]: scratch memory
  float* loss_sum;
  int64_t* correct;
  // Backward pass.
  const float* dloss;  // gradient of the sum
  void* dlogits;       // may be the logits themselves
};

// At most 2^31 - 1 rows and 2^30 columns. The same inputs give the same bits, if the logits'
// address is the same modulo 16 bytes: that decides how a row is divided into vectors.
void masked_cross_entropy(const LossCudaParams& p, cudaStream_t stream);
void masked_cross_entropy_backward(const LossCudaParams& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
