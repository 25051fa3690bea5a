// Which keys the queries of a sequence see: those within a window around each one's position.
#pragma once

#include "attention/kernel_parts.h"

namespace bert_unpad {

// Rows begin .. end - 1 of a sequence.
struct RowRange {
  int begin, end;
  BU_DEVICE bool meets(int first, int last) const { return begin <= last && first < end; }
  BU_DEVICE bool holds(int first, int last) const { return begin <= first && last < end; }
};

// The lowest and the highest position of some queries. What any of them sees ends where the highest
// one's keys end, what all of them see ends where the lowest one's do.
struct PositionSpan {
  int lowest, highest;
};

class QueryWindows {
  const int32_t* given_;  // of all queries; null: a sequence's are its last keys
  uint32_t q_begin_;
  int64_t left_, right_;
  int q_len_, k_len_;

  BU_DEVICE static int between(int64_t x, int end) {
    return static_cast<int>(x < 0 ? 0 : x < end ? x : end);
  }
  BU_DEVICE int begin(int64_t position) const {
    return left_ < 0 ? 0 : between(position - left_, k_len_);
  }
  BU_DEVICE int end(int64_t position) const {
    return right_ < 0 ? k_len_ : between(position + right_ + 1, k_len_);
  }

 public:
  BU_DEVICE QueryWindows(const cuda::AttentionCudaParams& a, const AttentionBlock& block)
      : given_(a.query_positions),
        q_begin_(block.q_begin),
        left_(a.window.left),
        right_(a.window.right),
        q_len_(block.q_len),
        k_len_(block.k_len) {}

  // Whether a window ends anywhere.
  BU_DEVICE bool bounded() const { return left_ >= 0 || right_ >= 0; }

  // Rows beyond the last query count as the last one.
  BU_DEVICE int position(int row) const {
    const int there = row < q_len_ ? row : q_len_ - 1;
    return given_ == nullptr ? k_len_ - q_len_ + there
                             : load_global<int32_t>(given_ + q_begin_ + there);
  }

  // Of the queries `first` .. `first` + kRows - 1; kRows is 16 or a multiple of 32. All lanes of a
  // warp take part.
  template <int kRows>
  BU_DEVICE PositionSpan span(int first) const {
    if (given_ == nullptr) return {position(first), position(first + kRows - 1)};
    constexpr int kLanes = kRows < 32 ? kRows : 32;
    const int lane = threadIdx.x % kLanes;
    PositionSpan s{position(first + lane), position(first + lane)};
    const auto add = [&](int lowest, int highest) {
      s = {lowest < s.lowest ? lowest : s.lowest, highest > s.highest ? highest : s.highest};
    };
#pragma unroll
    for (int row = kLanes; row < kRows; row += kLanes) {
      const int more = position(first + lane + row);
      add(more, more);
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      const uint32_t lowest = shuffle_xor(static_cast<uint32_t>(s.lowest), mask);
      const uint32_t highest = shuffle_xor(static_cast<uint32_t>(s.highest), mask);
      add(static_cast<int>(lowest), static_cast<int>(highest));
    }
    return s;
  }

  // The keys that a query at this position sees; empty where end is not beyond begin.
  BU_DEVICE RowRange keys_at(int position) const { return {begin(position), end(position)}; }
  BU_DEVICE RowRange keys(int row) const { return keys_at(position(row)); }
  // The keys from the first to the last one that any of the queries sees.
  BU_DEVICE RowRange keys_of_any(PositionSpan s) const { return {begin(s.lowest), end(s.highest)}; }
  // The keys that all of them see; end may lie before begin.
  BU_DEVICE RowRange keys_of_all(PositionSpan s) const { return {begin(s.highest), end(s.lowest)}; }

  // Queries outside of these see none of the keys `first` .. `last`. All queries, where positions
  // are given.
  BU_DEVICE RowRange queries(int first, int last) const {
    if (given_ != nullptr) return {0, q_len_};
    const int64_t before = static_cast<int64_t>(k_len_) - q_len_;  // keys before the first query
    return {right_ < 0 ? 0 : between(first - right_ - before, q_len_),
            left_ < 0 ? q_len_ : between(last + left_ - before + 1, q_len_)};
  }
};

// Sets numbers of 16 queries and 64 keys (C tiles) to `value` where the query does not see the key.
// `seen`: the keys that rows g and g + 8 see; `first_key`: of the 64, in the sequence.
BU_DEVICE void replace_unseen(float (&c)[8][4], const RowRange (&seen)[2], int first_key,
                              float value) {
  const int column = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int from = seen[half].begin - first_key - column;
    const int count = seen[half].end - seen[half].begin;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (static_cast<uint32_t>(8 * n + i - from) >= static_cast<uint32_t>(count))
          c[n][2 * half + i] = value;
    }
  }
}

}  // namespace bert_unpad
