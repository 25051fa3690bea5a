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
  int order_columns;                         // 1 or 4
  int64_t q_tokens, k_tokens;
  int max_q, max_k;         // longest run of queries and of keys of one sequence
  float scale;              // of q k^T, before the softmax; finite, not 0
  uint32_t keep_threshold;  // of 65,536; 65,536 = no dropout
  const int64_t* rng;       // [2]: seed, offset; null without dropout
  const int32_t *cu_q, *cu_k;
  // [sequences, order_columns]: which sequence is started when; null = as they come. With 4 columns
  // (arguments.h) queries are the keys.
  const int32_t* order;
  AttentionWindow window;
  const int32_t*
      query_positions;  // [q_tokens], among the keys of the sequence; null: the last ones
  Packed<const void> q, k, v, out, dout;
  Packed<void> out_w, dq, dk, dv;
  float* lse;  // [heads, q_tokens]: log of the sum of exponentials of the scaled scores
  // Workspaces of the backward pass.
  float* delta;    // [heads, q_tokens]: rowsum(dout * out), with 16 bits times the rate kept
  float* dq_sums;  // attention_query_sums() floats; null where that is 0
};

// What is added to the scaled scores, by the distance (key position - query position), from -reach
// to reach; further ones count as these. Of table, query and key at least one is there.
struct AttentionCudaBias {
  int buckets, reach;
  const int32_t* bucket;          // [2 * reach + 1]: the bucket of a distance; null = no bias
  const float* table;             // [buckets, heads]
  float* distances;               // workspace [heads, 2 * reach + 1]: the table by distance
  Packed<const void> query, key;  // [query tokens, heads, buckets], [key tokens, heads, buckets]
  float* dtable;                  // [buckets, heads]; null: not needed
  void *dquery, *dkey;            // of the shapes of query and key, contiguous
  // Workspaces of the backward pass: sums in fp32, of the same shapes. Those of queries are there
  // for dtable too, which is summed up in parts [rows of dtable_parts, buckets, heads]. With fp32
  // data they are dquery and dkey.
  float *dquery_sums, *dkey_sums, *dtable_parts;
};

inline constexpr int kBiasPartRows = 256;  // queries whose sums make a row of dtable_parts
inline int64_t bias_parts(int64_t q_tokens) {
  return (q_tokens + kBiasPartRows - 1) / kBiasPartRows;
}

// Writes out_w and lse. Without groups one launch takes all sequences. Results do not depend on
// `order` and `groups`. Strides of q, k, v, dout are multiples of 16 bytes, and so are the
// pointers.
void attention_forward(const AttentionCudaParams& args, const AttentionCudaBias& bias,
                       std::span<const AttentionGroup> groups, cudaStream_t stream);

// Floats that attention_backward needs at dq_sums, on the current device.
int64_t attention_query_sums(const AttentionCudaParams& args, const AttentionCudaBias& bias);

// Writes dq, dk, dv and the gradients of the bias; overwrites the workspaces.
void attention_backward(const AttentionCudaParams& args, const AttentionCudaBias& bias,
                        std::span<const AttentionGroup> groups, cudaStream_t stream);

}  // namespace bert_unpad::cuda
