// Variable-length attention: what the binding hands to the CPU kernels, and the types that CPU and
// GPU share. No torch here.
#pragma once

#include <cstdint>

#include "common/philox.h"
#include "common/types.h"

namespace bert_unpad {

// A packed [tokens, heads, head_dim] operand: element (t, h, d) at p + t * token_stride +
// h * head_stride + d, in elements.
template <class T>
struct Packed {
  T* p;
  int64_t token_stride, head_stride;
};

// A run of sequences in launch order, none longer than max_q and max_k. A GPU launches each group
// on its own stream.
struct AttentionGroup {
  int sequences, max_q, max_k;
};

// At most this many groups run side by side.
inline constexpr int kMaxAttentionGroups = 4;

// One (sequence, head) of the batch; rows are those of the queries' and the keys' sequence.
struct AttentionTask {
  int sequence, head;
  int64_t q_begin, k_begin;  // first token
  int q_len, k_len;
};

struct AttentionCpuParams {
  DType dtype;
  int heads, head_dim;
  float scale;              // of q k^T, before the softmax
  uint32_t keep_threshold;  // of 65,536; 65,536 = no dropout
  RngKey rng;
  Packed<const void> q, k, v, out, dout;
  Packed<void> out_w, dq, dk, dv;
  float* lse;  // [heads, q_tokens]: log of the sum of exponentials of the scaled scores
  int64_t q_tokens;
};

struct AttentionKernels {
  // Floats of scratch memory that one task of these lengths needs.
  int64_t (*scratch)(int q_len, int k_len, int head_dim, bool backward);
  void (*forward)(const AttentionCpuParams&, const AttentionTask&, float* scratch);
  // Writes dq, dk, dv of the task's rows and head.
  void (*backward)(const AttentionCpuParams&, const AttentionTask&, float* scratch);
};

}  // namespace bert_unpad
