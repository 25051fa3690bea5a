// Variable-length attention on a GPU: what the binding hands to the kernels. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "attention/attention.h"

namespace bert_unpad::cuda {

// One call, all sequences. Pointers are the device's.
struct AttentionCudaParams {
  DType dtype;
  int heads, kv_heads, head_dim, sequences;  // heads: a multiple of kv_heads
  int64_t q_tokens, k_tokens;
  int max_q, max_k;         // longest run of queries and of keys of one sequence
  float scale;              // of q k^T, before the softmax; finite, not 0
  uint32_t keep_threshold;  // of 65,536; 65,536 = no dropout
  const int64_t* rng;       // [2]: seed, offset; null without dropout
  const int32_t *cu_q, *cu_k;
  const int32_t* order;  // [sequences]: which sequence is started when; null = as they come
  AttentionWindow window;
  const int32_t*
      query_positions;  // [q_tokens], among the keys of the sequence; null: the last ones
  Packed<const void> q, k, v, out, dout;
  Packed<void> out_w, dq, dk, dv;
  float* lse;    // [heads, q_tokens]: log of the sum of exponentials of the scaled scores
  float* delta;  // [heads, q_tokens], backward's workspace: rowsum(dout * out)
};

// Writes out_w and lse. Without groups one launch takes all sequences. Results do not depend on
// `order` and `groups`. Strides of q, k, v, dout are multiples of 16 bytes, and so are the
// pointers.
void attention_forward(const AttentionCudaParams& args, std::span<const AttentionGroup> groups,
                       cudaStream_t stream);

// Writes dq, dk, dv; overwrites delta.
void attention_backward(const AttentionCudaParams& args, std::span<const AttentionGroup> groups,
                        cudaStream_t stream);

}  // namespace bert_unpad::cuda
