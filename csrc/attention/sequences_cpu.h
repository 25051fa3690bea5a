// Packed sequences on a CPU: checks of cu_seqlens, and the tasks of attention's forward pass.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/arguments.h"
#include "attention/cu_seqlens_errors.h"

namespace bert_unpad {

// Checks the values of a cu_seqlens and returns them.
inline const int32_t* check_cu_seqlens(const AttentionRows& rows, const char* op) {
  const char* name = rows.cu_name;
  const auto* values = rows.cu_seqlens.const_data_ptr<int32_t>();
  const int64_t tokens = rows.data.size(0), last = rows.cu_seqlens.size(0) - 1;
  check(values[0] == 0, op, ": ", name, " " BU_CU_SEQLENS_START ", got ", values[0]);
  for (int64_t i = 0; i < last; ++i) {
    check(values[i + 1] >= values[i], op, ": ", name, " " BU_CU_SEQLENS_ORDER ", got ",
          values[i + 1], " after ", values[i]);
    check(values[i + 1] - values[i] <= rows.max_seqlen, op, ": ", name,
          " " BU_CU_SEQLENS_LONGEST ", ", rows.max_seqlen, ", but sequence ", i, " has ",
          values[i + 1] - values[i], " tokens");
  }
  check(values[last] == tokens, op, ": ", name, " " BU_CU_SEQLENS_END ", ", tokens,
        ", but ends at ", values[last]);
  return values;
}

// The numbers of the sequences, the most work first.
inline std::vector<int> by_work(const int32_t* cu_q, const int32_t* cu_k, int64_t sequences) {
  std::vector<int> order(sequences);
  for (int64_t i = 0; i < sequences; ++i) order[i] = static_cast<int>(i);
  const auto work = [&](int i) {
    return static_cast<int64_t>(cu_q[i + 1] - cu_q[i]) * (cu_k[i + 1] - cu_k[i]);
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return work(a) > work(b); });
  return order;
}

// All of sequence i.
inline AttentionTask sequence_task(const int32_t* cu_q, const int32_t* cu_k, int i) {
  return {i, 0, cu_q[i], cu_k[i], cu_q[i + 1] - cu_q[i], cu_k[i + 1] - cu_k[i], 0, 0, 0, 0};
}

// Adds a task of rows [first, last) for each head: the same part for all heads before the next
// part, so that tasks that wait for one another in the backward pass seldom run at the same time.
inline void add_tasks(std::vector<AttentionTask>& tasks, AttentionTask t, int heads, int first,
                      int last) {
  t.first = first;
  t.last = last;
  for (t.head = 0; t.head < heads; ++t.head) tasks.push_back(t);
}

// The tasks of the forward pass, for sequences in this order.
inline std::vector<AttentionTask> forward_tasks(const std::vector<int>& order, const int32_t* cu_q,
                                                const int32_t* cu_k, int heads,
                                                AttentionSplit split) {
  std::vector<AttentionTask> tasks;
  for (int i : order) {
    const AttentionTask sequence = sequence_task(cu_q, cu_k, i);
    const int part = part_size(sequence.q_len, split);
    for (int first = 0; first < sequence.q_len; first += part)
      add_tasks(tasks, sequence, heads, first, std::min(first + part, sequence.q_len));
  }
  return tasks;
}

}  // namespace bert_unpad
