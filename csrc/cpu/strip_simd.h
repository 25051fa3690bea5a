// Several vectors in lockstep, for functions with long chains of dependent instructions.
//
// An out-of-order core holds about two iterations of a 50-instruction loop in its scheduler, which
// is too few to hide the latency of a polynomial and a division. A strip does each
// operation on several neighbouring vectors before the next one: 1.5x faster for GELU, measured.
#pragma once

#include "cpu/columns_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {

inline constexpr int kStripVectors = kVectorRegisters == 32 ? 4 : 2;

template <int N>
struct Strip {
  f32v v[N];
};

// f of the vectors of the strips, one by one.
template <class F, int N, class... Strips>
BU_INLINE Strip<N> lockstep(const F& f, const Strip<N>& first, const Strips&... more) {
  Strip<N> out;
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) out.v[i] = f(first.v[i], more.v[i]...);
  return out;
}

#define BU_STRIP_OPERATOR(op)                                                                    \
  template <int N>                                                                               \
  BU_INLINE Strip<N> operator op(const Strip<N>& a, const Strip<N>& b) {                         \
    return lockstep([](f32v x, f32v y) __attribute__((always_inline)) { return x op y; }, a, b); \
  }                                                                                              \
  template <int N>                                                                               \
  BU_INLINE Strip<N> operator op(const Strip<N>& a, float b) {                                   \
    return lockstep([b](f32v x) __attribute__((always_inline)) { return x op splat(b); }, a);    \
  }                                                                                              \
  template <int N>                                                                               \
  BU_INLINE Strip<N> operator op(float a, const Strip<N>& b) {                                   \
    return lockstep([a](f32v y) __attribute__((always_inline)) { return splat(a) op y; }, b);    \
  }
BU_STRIP_OPERATOR(+)
BU_STRIP_OPERATOR(-)
BU_STRIP_OPERATOR(*)
BU_STRIP_OPERATOR(/)
#undef BU_STRIP_OPERATOR

template <int N>
BU_INLINE Strip<N> exp2v(const Strip<N>& v) {
  const Strip<N> x = lockstep(clamp_exp2, v), n = lockstep(round_to_int, x);
  return lockstep(scale_exp2, exp2_fraction(x - n), n);
}

template <int N>
struct Whole {};  // N whole vectors

template <int N, class T>
BU_INLINE Strip<N> load_strip(const T* p, Whole<N>) {
  Strip<N> out;
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) out.v[i] = load(p + i * kLanes);
  return out;
}
template <class T>
BU_INLINE Strip<1> load_strip(const T* p, Tail tail) {
  return {{load_n(p, tail.n)}};
}
template <class T, int N>
BU_INLINE void store_whole(T* p, const Strip<N>& strip) {
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) store(p + i * kLanes, strip.v[i]);
}
template <class T, int N>
BU_INLINE void store_strip(T* p, const Strip<N>& strip, Whole<N>) {
  store_whole(p, strip);
}
template <class T>
BU_INLINE void store_strip(T* p, const Strip<1>& strip, Tail tail) {
  store_n(p, strip.v[0], tail.n);
}

// As for_columns, in strips.
template <class Body>
BU_INLINE void for_strips(int64_t n, const Body& body) {
  int64_t j = 0;
  for (; j + kStripVectors * kLanes <= n; j += kStripVectors * kLanes)
    body(j, Whole<kStripVectors>{});
  for (; j + kLanes <= n; j += kLanes) body(j, Whole<1>{});
  if (j < n) body(j, Tail{static_cast<int>(n - j)});
}

}  // namespace bert_unpad::BERT_UNPAD_ISA
