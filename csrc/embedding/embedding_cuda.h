// dropout(LN(word + position + token type)) on a GPU: what the binding hands to the kernels. No
// torch here.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/column_scratch.h"
#include "cuda/norm_row_params.h"
#include "embedding/token_sort.h"

namespace bert_unpad::cuda {

// Tables are [entries, hidden], contiguous, of `table_dtype`: fp32 or that of the activations.
// y and dy are [tokens, hidden]; norm.rows counts tokens.
struct EmbeddingCudaParams {
  static constexpr int kRowOperands = 3;  // tensors that a row is made of
  static constexpr bool kCopiedAhead = false;
  RowNormParams norm;
  DType table_dtype;
  TokenIds tokens;
  const void* tables[kTables];
  void* y;
  // Of the backward pass: the tables' gradients, and scratch memory.
  void* dtables[kTables];
  float* dz;            // [tokens, embedding_stride]: gradient of the sum of the three embeddings
  int32_t* sort_space;  // [token_sort_words]
  float* pieces;        // [embedding_pieces, embedding_stride]
};

void embedding_layer_norm(const EmbeddingCudaParams& p, cudaStream_t stream);

// Length of an fp32 row in scratch memory: whole groups of 8 columns.
constexpr int64_t embedding_stride(int64_t hidden) { return (hidden + 7) / 8 * 8; }
int64_t embedding_pieces(int64_t tokens);
// What norm.partials, of 2 sums, and norm.tickets are. Needs the sizes and the activations'
// pointers.
ColumnScratch embedding_layer_norm_scratch(const EmbeddingCudaParams& p);

// No atomic sums: every row of a table's gradient is summed in token order, in pieces that depend
// on the ids alone.
void embedding_layer_norm_backward(const EmbeddingCudaParams& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
