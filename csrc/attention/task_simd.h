// What both kinds of CPU attention kernels share: constants, scratch memory, where a task's rows
// are, and which keys they see.
#pragma once

#include <sched.h>

#include "attention/attention.h"
#include "cpu/simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {

inline constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;
inline constexpr float kInfinity = __builtin_inff();

// The row of a token and head.
template <class T>
BU_INLINE const T* at(const Packed<const void>& x, int64_t token, int head) {
  return static_cast<const T*>(x.p) + token * x.token_stride + head * x.head_stride;
}
template <class T>
BU_INLINE T* at(const Packed<void>& x, int64_t token, int head) {
  return static_cast<T*>(x.p) + token * x.token_stride + head * x.head_stride;
}

// Hands out a task's scratch memory; without memory, counts how much a task needs.
struct Scratch {
  char* base;
  int64_t bytes = 0;
  template <class T>
  BU_INLINE T* take(int64_t n) {
    const int64_t at = bytes;
    bytes += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + at);
  }
};

// Columns or rows from `first` to `last`.
struct Range {
  int first, last;
  BU_INLINE int size() const { return last - first; }
};

// What two ranges share; where that is nothing, an empty range where `b` begins.
BU_INLINE Range both(Range a, Range b) {
  const int first = a.first > b.first ? a.first : b.first, last = a.last < b.last ? a.last : b.last;
  return first < last ? Range{first, last} : Range{b.first, b.first};
}

// `range`, with its first column down to a multiple.
BU_INLINE Range aligned(Range range, int multiple) {
  return {range.first / multiple * multiple, range.last};
}

BU_INLINE Range shifted(Range range, int by) { return {range.first - by, range.last - by}; }

BU_INLINE bool bounded(const AttentionCpuParams& p) {
  return p.window.left >= 0 || p.window.right >= 0;
}

// Whether a window lets a query see less than half of that many keys.
BU_INLINE bool narrow(const AttentionCpuParams& p, int keys) {
  return p.window.left >= 0 && p.window.right >= 0 && p.window.left + p.window.right < keys / 2;
}

// Where query `row` of the sequence is among its keys.
BU_INLINE int64_t position(const AttentionCpuParams& p, const AttentionTask& t, int row) {
  return p.query_positions ? p.query_positions[t.q_begin + row] : t.k_len - t.q_len + row;
}

// The keys that queries at positions `low` to `high` see; 0 to 0 where they see none.
BU_INLINE Range seen_between(const AttentionCpuParams& p, const AttentionTask& t, int64_t low,
                             int64_t high) {
  int64_t first = p.window.left < 0 ? 0 : low - p.window.left;
  int64_t last = p.window.right < 0 ? t.k_len : high + p.window.right + 1;
  first = first < 0 ? 0 : first;
  last = last > t.k_len ? t.k_len : last;
  if (first >= last) return {0, 0};
  return {static_cast<int>(first), static_cast<int>(last)};
}

// The keys that one query sees.
BU_INLINE Range seen(const AttentionCpuParams& p, const AttentionTask& t, int row) {
  const int64_t at = position(p, t, row);
  return seen_between(p, t, at, at);
}

// The same among `columns`, counted from the first of these; without a window these are all keys.
BU_INLINE Range seen_among(const AttentionCpuParams& p, const AttentionTask& t, int row,
                           Range columns) {
  if (!bounded(p)) return {0, columns.size()};
  return shifted(both(seen(p, t, row), columns), columns.first);
}

// The keys from the first to the last that any of these queries sees.
BU_INLINE Range seen(const AttentionCpuParams& p, const AttentionTask& t, Range rows) {
  if (!bounded(p) || rows.size() <= 0) return {0, rows.size() > 0 ? t.k_len : 0};
  int64_t low = position(p, t, rows.first), high = position(p, t, rows.last - 1);
  if (p.query_positions)
    for (int row = rows.first; row < rows.last; ++row) {
      const int64_t at = position(p, t, row);
      low = at < low ? at : low;
      high = at > high ? at : high;
    }
  return seen_between(p, t, low, high);
}

// The head of keys and values that a head of queries reads.
BU_INLINE int key_head(const AttentionCpuParams& p, int head) {
  return head / (p.heads / p.kv_heads);
}

// Sums of dq of a head's rows from `token` on, for the turns below; as many numbers a row as
// head_dim to a multiple of kLanes.
BU_INLINE float* dq_sums(const AttentionCpuParams& p, int head, int64_t token) {
  return p.dq_sums + (head * p.q_tokens + token) * round_up(p.head_dim, 16);
}

// In the backward pass: which of the tasks of a sequence's keys add to dq of a block of queries,
// one after the other.
struct Turn {
  int first, last, mine;
  bool several;  // whether there are others
  int32_t* added;

  // `keys`: those that the block sees; the first task has to write dq of a block that sees none.
  BU_INLINE Turn(const AttentionCpuParams& p, const AttentionTask& t, int head, int row, Range keys)
      : first(keys.first / t.key_part),
        last((keys.last > 0 ? keys.last - 1 : 0) / t.key_part),
        mine(t.first / t.key_part),
        several(last > first),
        added(several ? p.added + head * p.q_tokens + t.q_begin + row : nullptr) {}

  BU_INLINE bool taken() const { return mine >= first && mine <= last; }
  // Tasks are started in the order of their keys, so this one waits only for such as are running.
  BU_INLINE void wait(const AttentionCpuParams& p) const {
    if (several)
      while (__atomic_load_n(added, __ATOMIC_ACQUIRE) < mine - first &&
             !__atomic_load_n(p.failed, __ATOMIC_RELAXED))
        sched_yield();
  }
  BU_INLINE void end() const {
    if (several) __atomic_store_n(added, mine - first + 1, __ATOMIC_RELEASE);
  }
};

}  // namespace bert_unpad::BERT_UNPAD_ISA
