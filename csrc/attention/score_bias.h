// The position bias in attention's kernels: what it adds to scores, and the sums of their gradients
// by bucket.
//
// Each row of queries, and of keys, has a sum for every bucket in global memory. A warp that owns
// 16 rows leaves the gradients of 16 x 16 scores in shared memory, with wgmma of 16 x 64; then one
// lane a row adds them up in the order of their columns. So any buckets will do: no two lanes share
// a sum, and the order of additions depends on the data's coordinates alone.
#pragma once

#include <algorithm>

#include "attention/kernel_parts.h"
#include "attention/query_windows.h"

namespace bert_unpad {

// Where the distance from a query at this position to key 0 is among a bias's distances; may be
// beyond their ends.
BU_DEVICE int place_of_key_0(const cuda::AttentionCudaBias& bias, int64_t position, int k_len) {
  const int64_t reach = bias.reach;
  // Further away all distances are the last one, and the result still fits.
  const int64_t last = k_len + reach;
  return static_cast<int>(reach - (position < -reach ? -reach : position < last ? position : last));
}

// What is added to the scores of one sequence and head.
template <class T>
class ScoreBias {
  const cuda::AttentionCudaBias& bias_;
  const float* distances_;  // null: no table
  HeadRows<const T> query_, key_;
  int k_len_;

 public:
  BU_DEVICE ScoreBias(const AttentionBiasLaunch& p, const AttentionBlock& block, int head)
      : bias_(p.bias),
        distances_(p.bias.distances == nullptr
                       ? nullptr
                       : p.bias.distances + head * (2 * int64_t{p.bias.reach} + 1)),
        query_(p.bias.query, block.q_begin, head),
        key_(p.bias.key, block.k_begin, head),
        k_len_(block.k_len) {}

  // A query's place_of_key_0.
  BU_DEVICE int start(const QueryWindows& windows, int query) const {
    return place_of_key_0(bias_, windows.position(query), k_len_);
  }

  // Where the distance to a key is, and its bucket.
  BU_DEVICE int place(int start, int key) const {
    const int at = start + key, last = 2 * bias_.reach;
    return at < 0 ? 0 : at < last ? at : last;
  }
  BU_DEVICE int bucket(int start, int key) const {
    return load_global<int32_t>(bias_.bucket + place(start, key));
  }

  // Scores (of C tiles side by side) times `factor` plus the bias, in base 2; two tiles at a time,
  // as there are no registers for more. at(n, i) is the score s[n][i]'s query, which exists, its
  // start, and its key.
  struct Score {
    int query, start, key;
  };
  template <int kTiles, int kScores, class At>
  BU_DEVICE void add(float (&s)[kTiles][kScores], float factor, const At& at) const {
    constexpr int kAtOnce = kTiles < 2 ? kTiles : 2;
#pragma unroll
    for (int first = 0; first < kTiles; first += kAtOnce) {
      const auto each = [&](const auto& f) {
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
          for (int i = 0; i < kScores; ++i) f(n, i);
        }
      };
      int places[kAtOnce][kScores];
      float sum[kAtOnce][kScores] = {};
      each([&](int n, int i) {
        const Score score = at(first + n, i);
        places[n][i] = place(score.start, score.key);
      });
      if (distances_ != nullptr)
        each([&](int n, int i) { sum[n][i] = load_global<float>(distances_ + places[n][i]); });
      if (bias_.query.p != nullptr || bias_.key.p != nullptr)
        each([&](int n, int i) {
          places[n][i] = load_global<int32_t>(bias_.bucket + places[n][i]);
        });
      if (bias_.query.p != nullptr) {
        each([&](int n, int i) {
          sum[n][i] += to_float(load_global<T>(query_.at(at(first + n, i).query, places[n][i])));
        });
      }
      if (bias_.key.p != nullptr) {
        each([&](int n, int i) {
          const int key = at(first + n, i).key;  // beyond the last one the score does not count
          sum[n][i] +=
              to_float(load_global<T>(key_.at(key < k_len_ ? key : k_len_ - 1, places[n][i])));
        });
      }
      each([&](int n, int i) {
        float& x = s[first + n][i];
        x = fma(x, factor, sum[n][i] * kLog2e);
      });
    }
  }
};

// The sums of a head's rows from a token on, within [tokens, heads, buckets]; null: none are
// needed.
struct BucketRows {
  float* first;
  int64_t stride;

  BU_DEVICE BucketRows(float* all, const AttentionBiasLaunch& p, int64_t token, int head)
      : first(all), stride(static_cast<int64_t>(p.args.heads) * p.bias.buckets) {
    if (all != nullptr) first += token * stride + static_cast<int64_t>(head) * p.bias.buckets;
  }

  BU_DEVICE float* row(int row) const { return first + row * stride; }

  // All lanes of a warp take part, and must synchronise before one of them adds.
  BU_DEVICE void zero(int rows, int buckets) const {
    if (first == nullptr) return;
    for (int row = 0; row < rows; ++row)
      for (int b = threadIdx.x % 32; b < buckets; b += 32)
        store_global<float>(first + row * stride + b, 0.0f);
  }
};

// A warp's 16 x kColumns gradients of scores in shared memory. 16 numbers or more before the first
// row, between rows and after the last one are zeros for diagonal(), once clear() has been called.
template <int kColumns>
class GradientTile {
  // Rows begin in different banks, and at multiples of 16 bytes.
  static constexpr uint32_t kRowBytes = 4 * kColumns + (kColumns == 16 ? 80 : 96);
  static constexpr uint32_t kMargin = 64;
  uint32_t at_;

 public:
  static constexpr uint32_t kBytes = 16 * kRowBytes + kMargin;

  // Of this warp; those of the block begin at offset `first`.
  BU_DEVICE explicit GradientTile(uint32_t first)
      : at_(first + threadIdx.x / 32 * kBytes + kMargin) {}

  BU_DEVICE void clear() const {
    for (uint32_t at = threadIdx.x % 32 * 16; at < kBytes; at += 512)
      store_shared<Vector<float, 4>>(at_ - kMargin + at, {});
  }

  // The sum of the numbers whose column is `number` - 15 further on than their row, `number` up to
  // kColumns + 15.
  BU_DEVICE float diagonal(int number) const {
    float sum[2] = {};
    const uint32_t at = at_ + 4 * (number - 15);
#pragma unroll
    for (uint32_t row = 0; row < 16; ++row)
      sum[row % 2] += load_shared<float>(at + row * (kRowBytes + 4));
    return sum[0] + sum[1];
  }

  // C tiles side by side.
  BU_DEVICE void store(const float (&c)[kColumns / 8][4]) const {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half)
        store_shared<FloatPair>(at_ + (lane / 4 + 8 * half) * kRowBytes + 32 * n + 8 * (lane % 4),
                                {c[n][2 * half], c[n][2 * half + 1]});
    }
  }

  // Adds this lane's row, of lanes 0 to 15, times `factor` to its sums: steps of 16 columns for
  // which needed(first column). `bucket(column)`: that of a column. Four sums are read at a time;
  // columns that share one meet before.
  template <class Needed, class Bucket>
  BU_DEVICE void add_row(float* sums, float factor, const Needed& needed,
                         const Bucket& bucket) const {
#pragma unroll 1
    for (int step = 0; step < kColumns; step += 16)
      if (needed(step)) add_step(sums, factor, step, bucket);
  }

 private:
  template <class Bucket>
  BU_DEVICE void add_step(float* sums, float factor, int step, const Bucket& bucket) const {
    const uint32_t row = at_ + threadIdx.x % 32 * kRowBytes + 4 * step;
    int buckets[16];
#pragma unroll
    for (int column = 0; column < 16; ++column) buckets[column] = bucket(step + column);
#pragma unroll
    for (int first = 0; first < 16; first += 4) {
      auto x = load_shared<Vector<float, 4>>(row + 4 * first);
      bool alone[4] = {true, true, true, true};
#pragma unroll
      for (int i = 3; i > 0; --i) {
#pragma unroll
        for (int j = i - 1; j >= 0; --j) {
          if (!alone[i] || buckets[first + i] != buckets[first + j]) continue;
          x.v[j] += x.v[i];
          alone[i] = false;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (alone[i]) x.v[i] = fma(x.v[i], factor, load_global<float>(sums + buckets[first + i]));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (alone[i]) store_global<float>(sums + buckets[first + i], x.v[i]);
    }
  }
};

// The bias of a warp's 16 queries, `first_row` the first of them; without a bias, nothing.
template <class T, bool kBias>
struct QueryBias {
  BU_DEVICE QueryBias(const AttentionLaunch&, const AttentionBlock&, const QueryWindows&, int) {}
  template <int kTiles>
  BU_DEVICE void add(float (&)[kTiles][4], int, float) const {}
};

template <class T>
struct QueryBias<T, true> {
  ScoreBias<T> bias;
  int query[2], start[2];  // rows g and g + 8

  BU_DEVICE QueryBias(const AttentionBiasLaunch& p, const AttentionBlock& block,
                      const QueryWindows& windows, int first_row)
      : bias(p, block, block.head) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half;
      query[half] = row < block.q_len ? row : block.q_len - 1;
      start[half] = bias.start(windows, row);
    }
  }

  // To the scores of 8 * kTiles keys from `first_key` on.
  template <int kTiles>
  BU_DEVICE void add(float (&s)[kTiles][4], int first_key, float factor) const {
    const int key = first_key + 2 * static_cast<int>(threadIdx.x % 4);
    bias.add(s, factor, [&](int n, int i) {
      return typename ScoreBias<T>::Score{query[i / 2], start[i / 2], key + 8 * n + i % 2};
    });
  }
};

// The sums of a warp's 16 rows under one head of queries.
template <int kColumns>
struct BiasSums {
  BucketRows rows;
  int count, buckets;  // of rows that are there, and of a row
  GradientTile<kColumns> tile;

  // `after`: rows from the first one to the sequence's end. `shared`: where the block's tiles
  // begin.
  BU_DEVICE BiasSums(const BucketRows& all, int after, int of_row, uint32_t shared)
      : rows(all), count(std::min(after, 16)), buckets(of_row), tile(shared) {}

  // Before all else.
  BU_DEVICE void zero() const { rows.zero(count, buckets); }

  // Leaves gradients where add_up() finds them.
  BU_DEVICE void put(const float (&gradients)[kColumns / 8][4]) const {
    if (rows.first != nullptr) tile.store(gradients);
  }

  // Adds them up, times `factor`. `first`: of the columns, in the sequence; those outside of
  // `seen` are zeros. `bucket(column)`: that of one in the sequence.
  template <class Bucket>
  BU_DEVICE void add_up(int first, RowRange seen, float factor, const Bucket& bucket) const {
    if (rows.first == nullptr) return;
    sync_warp();
    if (static_cast<int>(threadIdx.x % 32) < count)
      tile.add_row(
          rows.row(threadIdx.x % 32), factor,
          [&](int column) { return seen.meets(first + column, first + column + 15); },
          [&](int column) { return bucket(first + column); });
    // Wider ones are put once for each barrier of the block.
    if constexpr (kColumns == 16) sync_warp();
  }
};

// The sums of a warp's 16 queries; without a bias, nothing.
template <class T, bool kBias, int kColumns = 16>
struct QueryBiasSums {
  BU_DEVICE QueryBiasSums(const AttentionLaunch&, const AttentionBlock&, const QueryWindows&, int,
                          uint32_t) {}
  BU_DEVICE void zero() const {}
  BU_DEVICE void put(const float (&)[kColumns / 8][4]) const {}
  BU_DEVICE void add_up(int, RowRange, float) const {}
};

template <class T, int kColumns>
struct QueryBiasSums<T, true, kColumns> : BiasSums<kColumns> {
  ScoreBias<T> bias;
  int start;  // of this lane's row

  BU_DEVICE QueryBiasSums(const AttentionBiasLaunch& p, const AttentionBlock& block,
                          const QueryWindows& windows, int first_row, uint32_t shared)
      : BiasSums<kColumns>({p.bias.dquery_sums, p, block.q_begin + first_row, block.head},
                           block.q_len - first_row, p.bias.buckets, shared),
        bias(p, block, block.head),
        start(bias.start(windows, first_row + static_cast<int>(threadIdx.x % 32))) {}

  // Of kColumns keys from `first_key` on.
  BU_DEVICE void add_up(int first_key, RowRange seen, float factor) const {
    BiasSums<kColumns>::add_up(first_key, seen, factor,
                               [&](int key) { return bias.bucket(start, key); });
  }
};

// Works out the starts of queries at each use.
struct WindowStarts {
  const QueryWindows& windows;
  template <class T>
  BU_DEVICE int operator()(const ScoreBias<T>& bias, int query) const {
    return bias.start(windows, query);
  }
};

// The bias of a warp's 16 keys, `first` the first of them, under one head of queries, and their
// sums; without a bias, nothing. `Starts` knows the starts of queries.
template <class T, bool kBias, class Starts = WindowStarts, int kColumns = 16>
struct KeyBias {
  BU_DEVICE KeyBias(const AttentionLaunch&, const AttentionBlock&, const Starts&, int, int,
                    uint32_t) {}
  template <int kTiles>
  BU_DEVICE void add(float (&)[kTiles][4], int, float) const {}
  BU_DEVICE void zero() const {}
  BU_DEVICE void put(const float (&)[kColumns / 8][4]) const {}
  BU_DEVICE void add_up(int, RowRange, float) const {}
};

template <class T, class Starts, int kColumns>
struct KeyBias<T, true, Starts, kColumns> : BiasSums<kColumns> {
  ScoreBias<T> bias;
  Starts starts;
  int first, q_len;

  BU_DEVICE KeyBias(const AttentionBiasLaunch& p, const AttentionBlock& block,
                    const Starts& all_starts, int head, int first_key, uint32_t shared)
      : BiasSums<kColumns>(
            {p.first_column == 0 ? p.bias.dkey_sums : nullptr, p, block.k_begin + first_key, head},
            block.k_len - first_key, p.bias.buckets, shared),
        bias(p, block, head),
        starts(all_starts),
        first(first_key),
        q_len(block.q_len) {}

  // To the scores of 8 * kTiles queries from `first_query` on, [keys, queries].
  template <int kTiles>
  BU_DEVICE void add(float (&s)[kTiles][4], int first_query, float factor) const {
    const int lane = threadIdx.x % 32, column = first_query + 2 * (lane % 4);
    bias.add(s, factor, [&](int n, int i) {
      const int query = column + 8 * n + i % 2;
      return typename ScoreBias<T>::Score{query < q_len ? query : q_len - 1, starts(bias, query),
                                          first + lane / 4 + 8 * (i / 2)};
    });
  }

  // Of kColumns queries from `first_query` on.
  BU_DEVICE void add_up(int first_query, RowRange seen, float factor) const {
    BiasSums<kColumns>::add_up(first_query, seen, factor, [&](int query) {
      return bias.bucket(starts(bias, query), first + static_cast<int>(threadIdx.x % 32));
    });
  }
};

}  // namespace bert_unpad
