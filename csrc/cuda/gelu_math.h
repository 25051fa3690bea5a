// GELU (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016) and its derivative, in fp32.
//
// gelu(u) = u * Phi(u). The exact form computes Phi from erf, the other one from tanh. Small values
// keep their relative accuracy (the usual 1 + erf and 1 + tanh cancel for negative u), and value
// and derivative share one exponential. In bf16 a GPU can spend about 30 instructions per element
// before arithmetic, not memory, is the limit; erff() and expf() take more.
#pragma once

#include "common/macros.h"
#include "cuda/math.h"

namespace bert_unpad {

// Phi(u) and the normal density at u.
struct Normal {
  float cdf, pdf;
};

// Phi(-|u|) = exp(-u^2 / 2) * t * P(t) with t = 1 / (1 + |u| / (2 sqrt 2)). P is our own minimax
// fit of erfc(x) exp(x^2) / (2 t), |x| <= 10; the fit's relative error is 4.3e-8, in fp32 3e-7. The
// rounding of u^2 adds 6e-8 * u^2.
BU_HD Normal normal_erf(float u) {
  const float a = u < 0.0f ? -u : u;
  const float t = reciprocal_approx(fma(a, 0.35355339059327373f, 1.0f));
  const float e = exp2_approx(u * u * -0.72134752044448170f);  // exp(-u^2 / 2)
  float p = -0.029534483328461647f;
  p = fma(p, t, 0.1422874927520752f);
  p = fma(p, t, -0.24359998106956482f);
  p = fma(p, t, 0.13903360068798065f);
  p = fma(p, t, -0.013312848284840584f);
  p = fma(p, t, 0.10134343802928925f);
  p = fma(p, t, 0.12155187875032425f);
  p = fma(p, t, 0.1411876529455185f);
  p = fma(p, t, 0.14104321599006653f);
  const float tail = p * t * e;
  return {u < 0.0f ? tail : 1.0f - tail, 0.3989422804014327f * e};
}

// sigmoid(v) = (1 + tanh(v / 2)) / 2 with v = 2 k (u + 0.044715 u^3), k = sqrt(2 / pi);
// sigmoid(-v).
struct Sigmoid {
  float value, complement;
};

BU_HD Sigmoid sigmoid_tanh(float u) {
  const float cubic = fma(u * u, 0.044715f, 1.0f) * u;
  const float e = exp2_approx(cubic * -2.3022081981f);  // exp(-v)
  const float s = reciprocal_approx(1.0f + e);
  // Each form where it does not cancel; e may be infinite where u is negative.
  return {s, u > 0.0f ? e * s : 1.0f - s};
}

template <bool kTanh>
BU_HD float gelu(float u) {
  if constexpr (kTanh) return u * sigmoid_tanh(u).value;
  return u * normal_erf(u).cdf;
}

// d gelu(u) / du.
template <bool kTanh>
BU_HD float gelu_derivative(float u) {
  if constexpr (kTanh) {
    const Sigmoid s = sigmoid_tanh(u);
    const float slope = fma(u * u, 0.21406445f, 1.5957691216f);  // dv / du
    return fma(u * slope, s.value * s.complement, s.value);
  } else {
    const Normal n = normal_erf(u);
    return fma(u, n.pdf, n.cdf);
  }
}

}  // namespace bert_unpad
