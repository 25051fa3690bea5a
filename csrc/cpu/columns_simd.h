// Loops over the columns of a row, in whole vectors and one tail. The body is written once: it gets
// the column and a width (Full or Tail) to pass on to its loads and stores.
#pragma once

#include "cpu/philox_simd.h"
#include "cpu/simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {

struct Full {};  // a whole vector
struct Tail {    // the first n (< kLanes) elements of one
  int n;
};

template <class T>
BU_INLINE f32v load(const T* p, Full) {
  return load(p);
}
template <class T>
BU_INLINE f32v load(const T* p, Tail tail) {
  return load_n(p, tail.n);
}
template <class T>
BU_INLINE void store(T* p, f32v v, Full) {
  store(p, v);
}
template <class T>
BU_INLINE void store(T* p, f32v v, Tail tail) {
  store_n(p, v, tail.n);
}

// v with the lanes beyond the width set to zero.
BU_INLINE f32v first(f32v v, Full) { return v; }
BU_INLINE f32v first(f32v v, Tail tail) {
  return as_f32(as_u32(v) & (u32v)((i32v)lane_index() < tail.n));
}

template <class Body>
BU_INLINE void for_columns(int64_t n, const Body& body) {
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) body(j, Full{});
  if (j < n) body(j, Tail{static_cast<int>(n - j)});
}

// The dropout words of a whole row; `words` has room for a multiple of kRowDropoutColumns.
BU_INLINE void row_words(RngKey key, uint32_t threshold, uint32_t row, int64_t columns,
                         uint16_t* words) {
  const uint32_t flip = keep_rule(threshold).flip;
  for (int64_t j = 0; j < columns; j += kRowDropoutColumns)
    row_dropout_words(key, flip, row, static_cast<uint32_t>(j), words + j);
}

}  // namespace bert_unpad::BERT_UNPAD_ISA
