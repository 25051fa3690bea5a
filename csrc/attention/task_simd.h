// What both kinds of CPU attention kernels share: constants, and where a task's rows are.
#pragma once

#include "attention/attention.h"
#include "cpu/simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {

inline constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;

// The row of a token and head.
template <class T>
BU_INLINE const T* at(const Packed<const void>& x, int64_t token, int head) {
  return static_cast<const T*>(x.p) + token * x.token_stride + head * x.head_stride;
}
template <class T>
BU_INLINE T* at(const Packed<void>& x, int64_t token, int head) {
  return static_cast<T*>(x.p) + token * x.token_stride + head * x.head_stride;
}

}  // namespace bert_unpad::BERT_UNPAD_ISA
