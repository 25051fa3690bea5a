// What the activations' kernels compute, with its derivative, in fp32: GELU, SiLU and ReLU.
#pragma once

#include "common/macros.h"
#include "cuda/gelu_math.h"
#include "cuda/math.h"
#include "gelu/glu_kind.h"

namespace bert_unpad {

// x / (1 + exp(-x)) is u sigmoid(u) (Elfwing et al., 2017, arXiv:1702.03118).
BU_HD Sigmoid sigmoid(float u) {
  const float e = exp2_approx(u * -1.44269504089f);
  const float s = reciprocal_approx(1.0f + e);
  return {s, u > 0.0f ? e * s : 1.0f - s};
}

// A function's value and derivative, which share what is expensive.
struct ValueAndSlope {
  float value, slope;
};

template <GluKind kKind>
BU_HD ValueAndSlope activation(float u) {
  if constexpr (kKind == GluKind::kGelu) {
    const Normal n = normal_erf(u);
    return {u * n.cdf, fma(u, n.pdf, n.cdf)};
  } else if constexpr (kKind == GluKind::kGeluTanh) {
    return {gelu<true>(u), gelu_derivative<true>(u)};
  } else if constexpr (kKind == GluKind::kSilu) {
    const Sigmoid s = sigmoid(u);
    return {u * s.value, fma(u * s.value, s.complement, s.value)};
  } else {
    return {u < 0.0f ? 0.0f : u, u > 0.0f ? 1.0f : 0.0f};
  }
}

}  // namespace bert_unpad
