// The position bias of attention and its gradients, row by row (see PositionBias in
// bert_unpad/ops/position_bias.py).
#pragma once

#include "attention/task_simd.h"
#include "cpu/columns_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {

BU_INLINE f32v gather(const float* values, const int32_t* index) {
#if defined(__AVX512F__)
  return (f32v)_mm512_i32gather_ps(load_bits<__m512i>(index), values, 4);
#elif defined(__AVX2__)
  return (f32v)_mm256_i32gather_ps(values, load_bits<__m256i>(index), 4);
#else
  f32v out;
  for (int i = 0; i < kLanes; ++i) out[i] = values[index[i]];
  return out;
#endif
}

// Of a row's columns: [0, low) are further than the reach before the query, those from `high` on
// further behind it.
struct Reached {
  int low, high;
  // `distance`: from the query to the first column.
  BU_INLINE Reached(const AttentionBias& bias, int64_t distance, int width)
      : low(within(-bias.reach - distance, width)),
        high(within(bias.reach + 1 - distance, width)) {}
  BU_INLINE static int within(int64_t column, int width) {
    return column < 0 ? 0 : column > width ? width : static_cast<int>(column);
  }
};

// Scratch memory and loops over a row of a task with a position bias; without one, nothing. Its
// loops stay out of line, so that tasks without a bias are compiled as if there were none.
// T is the dtype of the data.
template <class T>
struct BiasRows {
  const AttentionCpuParams& p;
  const AttentionBias& bias;
  const AttentionTask& t;
  int32_t* bucket;       // of each column of a row
  float* values;         // of a row, by bucket
  float* distances;      // of a head, sums of the scores' gradients, by distance
  float *dquery, *dkey;  // of a block's rows and of the task's keys, by bucket

  BU_INLINE BiasRows(Scratch& scratch, const AttentionCpuParams& params, const AttentionTask& task,
                     int rows, int keys, bool backward)
      : p(params), bias(params.bias), t(task) {
    if (!bias.bucket) return;
    const int64_t buckets = bias.buckets;
    bucket = scratch.take<int32_t>(keys + 2 * kLanes);
    values = scratch.take<float>(buckets + kLanes);
    if (!backward) return;
    distances = scratch.take<float>(bias.dtable ? 2 * static_cast<int64_t>(bias.reach) + 1 : 0);
    dquery = scratch.take<float>(bias.query.p ? rows * buckets : 0);
    dkey = scratch.take<float>(bias.key.p ? keys * buckets : 0);
  }

  BU_INLINE explicit operator bool() const { return bias.bucket; }

  BU_INLINE int64_t distance(int row, Range columns) const {
    return columns.first - position(p, t, row);
  }

  void set_buckets(int row, Range columns) const {
    const int width = columns.size();
    const Reached reached(bias, distance(row, columns), width);
    const int32_t* middle = bias.bucket + bias.reach + distance(row, columns);
    for (int j = 0; j < reached.low; ++j) bucket[j] = bias.bucket[0];
    for (int j = reached.low; j < reached.high; ++j) bucket[j] = middle[j];
    for (int j = reached.high; j < width + kLanes; ++j) bucket[j] = bias.bucket[2 * bias.reach];
  }

  // s * factor + bias, in base 2, of the columns that a row sees; leaves set_buckets of the row.
  [[gnu::noinline]] void add(int head, int row, Range columns, Range seen, float factor,
                             float* s) const {
    set_buckets(row, columns);
    const float* table =
        bias.table ? bias.table + static_cast<int64_t>(head) * bias.buckets : nullptr;
    if (bias.query.p) {
      const T* query = at<T>(bias.query, t.q_begin + row, head);
      for_columns(bias.buckets, [&](int64_t b, auto width) {
        const f32v x = load(query + b, width);
        store(values + b, table ? x + load(table + b, width) : x);
      });
      table = values;
    }
    for (int j = seen.first / kLanes * kLanes; j < seen.last; j += kLanes) {
      f32v sum = {};
      if (table) sum += gather(table, bucket + j);
      if (bias.key.p) {
        T keys[kLanes] = {};
        for (int i = 0; i < kLanes && j + i < seen.last; ++i)
          keys[i] = at<T>(bias.key, t.k_begin + columns.first + j + i, head)[bucket[j + i]];
        sum += load(keys);
      }
      store(s + j, load(s + j) * factor + sum * kLog2e);
    }
  }

  // Zeroes the sums of a head.
  [[gnu::noinline]] void begin_head() const {
    if (bias.dtable)
      for (int64_t d = 0; d < 2 * static_cast<int64_t>(bias.reach) + 1; ++d) distances[d] = 0.0f;
    if (bias.key.p)
      for (int64_t i = 0; i < static_cast<int64_t>(t.last - t.first) * bias.buckets; ++i)
        dkey[i] = 0.0f;
  }

  // Adds up the gradients of a row's scores, ds. `r`: the row in its block. The buckets must be
  // set.
  template <class G>
  [[gnu::noinline]] void add_gradients(int r, int row, Range columns, Range seen,
                                       const G* ds) const {
    if (bias.dtable) {
      const int64_t first = distance(row, columns);
      const Reached reached(bias, first, columns.size());
      const Range low = both({0, reached.low}, seen), high = both({reached.high, seen.last}, seen);
      const Range middle = both({reached.low, reached.high}, seen);
      distances[0] += sum_of(ds, low);
      distances[2 * bias.reach] += sum_of(ds, high);
      float* out = distances + bias.reach + first + middle.first;
      for_columns(middle.size(), [&](int64_t j, auto width) {
        store(out + j, load(out + j, width) + load(ds + middle.first + j, width), width);
      });
    }
    if (!bias.query.p && !bias.key.p) return;
    float* query = bias.query.p ? dquery + static_cast<int64_t>(r) * bias.buckets : nullptr;
    if (query)
      for (int b = 0; b < bias.buckets; ++b) query[b] = 0.0f;
    float* key =
        bias.key.p ? dkey + static_cast<int64_t>(columns.first - t.first) * bias.buckets : nullptr;
    for (int j = seen.first / kLanes * kLanes; j < seen.last; j += kLanes) {
      float g[kLanes];
      const int begin = seen.first > j ? seen.first - j : 0;
      const int end = seen.last - j < kLanes ? seen.last - j : kLanes;
      store(g, load(ds + j));
      for (int i = begin; i < end; ++i) {
        const int b = bucket[j + i];
        if (query) query[b] += g[i];
        if (key) key[static_cast<int64_t>(j + i) * bias.buckets + b] += g[i];
      }
    }
  }

  // In this task's turn: adds the block's sums of dquery to those of the tasks before.
  [[gnu::noinline]] void add_query_sums(int head, Range rows, const Turn& turn) const {
    if (!bias.query.p) return;
    for (int r = 0; r < rows.size(); ++r) {
      const int64_t token = t.q_begin + rows.first + r;
      const float* here = dquery + static_cast<int64_t>(r) * bias.buckets;
      if (turn.several) {
        float* sums = bias.dquery_sums + (token * p.heads + head) * bias.buckets;
        for (int b = 0; b < bias.buckets; ++b)
          sums[b] = turn.mine > turn.first ? sums[b] + here[b] : here[b];
        here = sums;
      }
      if (turn.mine == turn.last) round_row(here, at<T>(bias.dquery, token, head));
    }
  }

  // Writes the gradients of a head's table and keys.
  [[gnu::noinline]] void end_head(int head) const {
    if (bias.dtable) {
      float* out = bias.dtable + (static_cast<int64_t>(t.part) * p.heads + head) * bias.buckets;
      for (int b = 0; b < bias.buckets; ++b) out[b] = 0.0f;
      for (int64_t d = 0; d < 2 * static_cast<int64_t>(bias.reach) + 1; ++d)
        out[bias.bucket[d]] += distances[d];
    }
    if (bias.key.p)
      for (int j = t.first; j < t.last; ++j)
        round_row(dkey + static_cast<int64_t>(j - t.first) * bias.buckets,
                  at<T>(bias.dkey, t.k_begin + j, head));
  }

 private:
  BU_INLINE void round_row(const float* sums, T* out) const {
    for_columns(bias.buckets,
                [&](int64_t b, auto width) { store(out + b, load(sums + b, width), width); });
  }

  template <class G>
  BU_INLINE static float sum_of(const G* x, Range columns) {
    f32v sum = {};
    for_columns(columns.size(),
                [&](int64_t j, auto width) { sum += load(x + columns.first + j, width); });
    return reduce_add(sum);
  }
};

}  // namespace bert_unpad::BERT_UNPAD_ISA
