// Softmax and dropout of rows of scores whose weights are bf16.
#pragma once

#include "attention/task_simd.h"
#include "cpu/pairs_simd.h"
#include "cpu/philox_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {

// A bit for each weight that dropout keeps, of rows from a multiple of 16 on, and columns from a
// multiple of 32 on: 16 columns a number, [rows to 16][stride].
inline void draw_kept(const AttentionCpuParams& p, const AttentionTask& t, int head, Range rows,
                      Range columns, int stride, uint16_t* kept) {
  const uint32_t stream = t.sequence * p.heads + head, flip = keep_rule(p.keep_threshold).flip;
  for (int base = 0; base < rows.size(); base += 16)
    for (int g = 0; g < 8; g += kAttentionDropoutRows)
      for (int c = 0; c < columns.size(); c += kAttentionDropoutColumns)
        draw_attention(p.rng, flip, stream, rows.first + base + g, columns.first + c,
                       [&](int i, int j, const Words32& words) __attribute__((always_inline)) {
                         store_bits(kept + (base + g + i) * int64_t{stride} + (c + j) / 16,
                                    kept_bits(words, p.keep_threshold));
                       });
}

// The columns of a range among 32 from `column` on.
BU_INLINE uint32_t columns_in(Range range, int column) {
  return first_columns(range.last - column) & ~first_columns(range.first - column);
}

// The largest score after scaling, before it: the greatest number, or the least where the scale is
// negative.
BU_INLINE float largest_score(const float* s, Range seen, bool negative) {
  f32v row_max = splat(negative ? kInfinity : -kInfinity);
  const auto include = [&](f32v x) __attribute__((always_inline)) {
    row_max = negative ? vmin(row_max, x) : vmax(row_max, x);
  };
  const auto take_some = [&](int j) __attribute__((always_inline)) {
    const i32v column = (i32v)lane_index() + j;
    include(select((column >= seen.first) & (column < seen.last), load(s + j), row_max));
  };
  int j = seen.first / kLanes * kLanes;
  if (j < seen.first) {
    take_some(j);
    j += kLanes;
  }
  for (; j + kLanes <= seen.last; j += kLanes) include(load(s + j));
  if (j < seen.last) take_some(j);
  return negative ? -reduce_max(-row_max) : reduce_max(row_max);
}

// One row: scores -> weights that are not normalised, 0 in the columns that the row does not see.
// `maximum` and `sum` (before dropout) go on from those of the parts of the keys before; returns
// the factor of what was summed up with these. The largest score is subtracted before scaling: a
// difference of equal numbers is 0 however large they are.
BU_INLINE float softmax_row(const float* s, Range seen, int width, float scale,
                            const uint16_t* kept, bf16* weights, float& maximum, float& sum) {
  const int begin = seen.first / 32 * 32, end = seen.size() > 0 ? round_up(seen.last, 32) : begin;
  for (int j = 0; j < begin; j += 32) store_bits(weights + j, Words{});
  for (int j = end; j < width; j += 32) store_bits(weights + j, Words{});
  if (seen.size() == 0) return 1.0f;
  const float largest = largest_score(s, seen, scale < 0.0f);
  const float before = maximum, here = largest * scale;
  const float shift = before > here ? here - before : 0.0f;
  maximum = before > here ? before : here;
  const float base = here == -kInfinity ? 0.0f : largest;  // a bias may be -inf
  f32v total = {};
  for (int j = begin; j < end; j += 32) {
    const uint32_t inside = columns_in(seen, j);
    const uint32_t stays = kept ? inside & load_bits<uint32_t>(kept + j / 16) : inside;
    f32v w[2 * kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kVectors; ++i) {
      const f32v e = exp2_short((load(s + j + kLanes * i) - base) * scale + shift);
      total += masked(e, inside >> (kLanes * i));
      w[i] = masked(e, stays >> (kLanes * i));
    }
    store_bits(weights + j, narrow_two(w, w + kVectors));
  }
  const float factor = before == -kInfinity ? 0.0f : exp2v(splat(before - maximum))[0];
  sum = sum * factor + reduce_add(total);
  return factor;
}

}  // namespace bert_unpad::BERT_UNPAD_ISA
