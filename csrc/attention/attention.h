// Variable-length attention: what the binding hands to the CPU kernels, and the types that CPU and
// GPU share. No torch here.
#pragma once

#include <cstdint>

#include "common/philox.h"
#include "common/types.h"
#include "cpu/isa.h"

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

// Where a query sees keys: those at most `left` before and `right` after it; -1 = no bound.
struct AttentionWindow {
  int64_t left, right;
};

// What is added to the scaled scores, by the distance (key position - query position), from -reach
// to reach; further ones count as these. Of table, query and key at least one is there.
struct AttentionBias {
  int buckets, reach;
  const int32_t* bucket;          // [2 * reach + 1]: the bucket of a distance; null = no bias
  const float* table;             // [heads, buckets]
  Packed<const void> query, key;  // [query tokens, heads, buckets], [key tokens, heads, buckets]
  float* dtable;                  // [parts of sequences, heads, buckets]; null: not needed
  Packed<void> dquery, dkey;
  float* dquery_sums;  // [q_tokens, heads, buckets], as dq_sums below
};

// A part of a sequence: forward, queries `first` to `last` of one head, with the keys that they
// see; backward, keys `first` to `last` of one key head, with the queries that see them, of all
// heads that read it.
struct AttentionTask {
  int sequence, head;
  int64_t q_begin, k_begin;  // the sequence's first tokens
  int q_len, k_len;          // of the sequence
  int first, last;
  int part;      // number of the part among those of all sequences, the same for all heads
  int key_part;  // of the backward pass: keys of each task of the sequence but the last
};

struct AttentionCpuParams {
  DType dtype;
  int heads, kv_heads, head_dim;
  float scale;              // of q k^T, before the softmax
  uint32_t keep_threshold;  // of 65,536; 65,536 = no dropout
  RngKey rng;
  AttentionWindow window;
  AttentionBias bias;
  const int32_t* query_positions;  // [q_tokens], among the keys; null: the last ones
  Packed<const void> q, k, v, out, dout;
  Packed<void> out_w, dq, dk, dv;
  float* lse;  // [heads, q_tokens]: log of the sum of exponentials of the scaled scores
  int64_t q_tokens;
  // Of the backward pass, where the keys of a sequence are several tasks: sums of dq, [heads,
  // q_tokens, head_dim to 16], and by the first row of each block of queries how many tasks have
  // added to them, [heads, q_tokens]. Tasks add in the order of their keys.
  float* dq_sums;
  int32_t* added;
  const int32_t* failed;  // not 0: a task has failed, and no other may wait for it
};

// How long runs of rows are split into parts of about equal size, a multiple of 32: up to `whole`
// rows not at all, beyond into parts of at most `part`.
struct AttentionSplit {
  int whole, part;
};

// Always inlined, because files of all instruction sets use it (see cpu/isa.h).
[[gnu::always_inline]] inline int part_size(int rows, AttentionSplit split) {
  if (rows <= split.whole) return rows > 0 ? rows : 1;
  const int parts = (rows + split.part - 1) / split.part;
  return ((rows + parts - 1) / parts + 31) / 32 * 32;
}

struct AttentionKernels {
  AttentionSplit queries, keys;  // of the forward pass; of the backward pass
  // Floats of scratch memory that a task needs.
  int64_t (*scratch)(const AttentionCpuParams&, const AttentionTask&, bool backward);
  void (*forward)(const AttentionCpuParams&, const AttentionTask&, float* scratch);
  // Writes dk and dv of the task's keys, and dq of the queries for which it is the last task.
  void (*backward)(const AttentionCpuParams&, const AttentionTask&, float* scratch);
};
BU_FP32_TABLE(AttentionKernels, attention_kernels)
BU_BF16_TABLE(AttentionKernels, attention_bf16_kernels)

}  // namespace bert_unpad
