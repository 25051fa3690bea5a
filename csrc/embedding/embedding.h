// Embeddings + LayerNorm + dropout: what the bindings hand to the CPU kernels.
#pragma once

#include <cstdint>

#include "common/philox.h"
#include "common/types.h"
#include "cpu/isa.h"

namespace bert_unpad {

// Tables are [entries, hidden], contiguous, all of one dtype: fp32 or that of the activations.
struct EmbeddingCpuParams {
  DType dtype, table_dtype;
  int64_t hidden;
  int64_t padded;  // hidden rounded up to whole vectors: row length of fp32 scratch, dz and sums
  float eps;
  uint32_t keep_threshold;  // of 65,536; 65,536 = no dropout
  RngKey rng;
  const int64_t* ids[3];  // word, position, token type, [tokens] each
  const void* tables[3];
  const float *weight, *bias;  // fp32, padded
  void* y;
  const void* dy;
  float* dz;           // [tokens, padded]: gradient of the sum of the three embeddings
  float *mean, *rstd;  // [tokens]
};

struct EmbeddingKernels {
  // Tokens [begin, end). Scratch: 2 rows of `padded` floats and the dropout words of a row.
  void (*forward)(const EmbeddingCpuParams&, int64_t begin, int64_t end, float* scratch);
  // Writes dz, and to sums [2][padded] what these tokens add to dweight and dbias.
  void (*backward)(const EmbeddingCpuParams&, int64_t begin, int64_t end, float* scratch,
                   float* sums);
  // out [columns] = the sum, in order, of `count` rows rows[order[i] * stride]; zeros for none.
  void (*sum_rows)(const float* rows, int64_t stride, const int32_t* order, int64_t count,
                   int64_t columns, DType dtype, void* out);
};
BU_ISA_TABLE(EmbeddingKernels, embedding_kernels)

}  // namespace bert_unpad
