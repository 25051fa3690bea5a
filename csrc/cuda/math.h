// The two hardware approximations from which kernels build exp, tanh and erf.
//
// On a GPU each is one instruction of the special function unit (about 2 and 1 ulp); elsewhere
// it is the exact function, so that formulas built on them can be tested without a GPU.
#pragma once

#include <cmath>

#include "common/macros.h"

namespace bert_unpad {

// 2^x; results below 2^-126 are zero on a GPU.
BU_HD float exp2_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

// 1 / x; 0 for infinity.
BU_HD float reciprocal_approx(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

// a * b + c in one rounding.
BU_HD float fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

}  // namespace bert_unpad
