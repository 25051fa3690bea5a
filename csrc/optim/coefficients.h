// The numbers of an update that change from step to step. They are computed once per tensor and
// step: on the host for CPU tensors, on a GPU by a tiny kernel, because step, learning rate and
// norm stay on the device.
//
// Decay rates are doubles: 1 - 0.999 in fp32 is off by 1.3e-5, which would show in every weight.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/finite.h"
#include "common/macros.h"

namespace bert_unpad {

// What an update is multiplied by that is computed from two passes over a tensor.
enum class Ratio : int16_t {
  kOne,      // nothing
  kTrust,    // |w| / |u| (LAMB)
  kRmsClip,  // 1 / max(1, RMS), with RMS^2 the mean of g^2 / v (StableAdamW)
};

// What a call gives for all of its tensors.
struct UpdateRule {
  double beta1, beta2, eps, weight_decay;
  double max_grad_norm;  // gradients are divided by max(1, norm / max_grad_norm); 0: are not
  bool decoupled;        // AdamW's weight decay; else it is added to the gradient (L2)
  bool bias_correction;
  bool grad_averaging;  // the gradient enters exp_avg times 1 - beta1
  Ratio ratio;
  bool nesterov;
  bool maximize;
  bool averaged = false;  // the gradients handed in are the new exp_avg themselves
};

inline UpdateRule adam_rule(double beta1, double beta2, double eps, double weight_decay,
                            double max_grad_norm, bool decoupled, bool bias_correction,
                            bool maximize) {
  return {.beta1 = beta1,
          .beta2 = beta2,
          .eps = eps,
          .weight_decay = weight_decay,
          .max_grad_norm = max_grad_norm,
          .decoupled = decoupled,
          .bias_correction = bias_correction,
          .grad_averaging = true,
          .ratio = Ratio::kOne,
          .nesterov = false,
          .maximize = maximize};
}

inline UpdateRule lamb_rule(double beta1, double beta2, double eps, double weight_decay,
                            double max_grad_norm, bool grad_averaging, bool bias_correction,
                            bool trust_ratio, bool nesterov, bool maximize) {
  return {.beta1 = beta1,
          .beta2 = beta2,
          .eps = eps,
          .weight_decay = weight_decay,
          .max_grad_norm = max_grad_norm,
          .decoupled = true,
          .bias_correction = bias_correction,
          .grad_averaging = grad_averaging,
          .ratio = trust_ratio ? Ratio::kTrust : Ratio::kOne,
          .nesterov = nesterov,
          .maximize = maximize};
}

inline UpdateRule stable_adamw_rule(double beta1, double beta2, double eps, double weight_decay,
                                    double max_grad_norm, bool maximize) {
  UpdateRule rule = adam_rule(beta1, beta2, eps, weight_decay, max_grad_norm, true, true, maximize);
  rule.ratio = Ratio::kRmsClip;
  return rule;
}

// The same as kernels take it. Moments are m + (1 - beta) (g - m): 1 - beta loses no digits.
struct RuleFactors {
  float decay1, decay2;  // 1 - beta
  float gradient1;       // of the gradient in exp_avg
  float beta1;
  float eps, weight_decay;
  int32_t decoupled;  // flags, of sizes that leave no padding: see optim/update.h
  Ratio ratio;
  int16_t nesterov;
};

inline RuleFactors factors_of(const UpdateRule& r) {
  const auto decay1 = r.averaged ? 1.0f : static_cast<float>(1.0 - r.beta1);
  return {decay1,
          static_cast<float>(1.0 - r.beta2),
          r.grad_averaging ? decay1 : 1.0f,
          static_cast<float>(r.beta1),
          static_cast<float>(r.eps),
          static_cast<float>(r.weight_decay),
          r.decoupled,
          r.ratio,
          r.nesterov};
}

// Of one tensor in one step; four floats, as the operators pass them on.
struct alignas(16) Coefficients {
  float gradient;     // times the gradient that was handed in
  float momentum;     // 1 / (1 - beta1^t)
  float denominator;  // 1 / sqrt(1 - beta2^t); 0: this update is skipped
  float lr;

  BU_HD bool skipped() const { return denominator == 0.0f; }
};

// beta^n by squaring.
BU_HD double power(double beta, int64_t n) {
  double result = 1.0;
  for (; n > 0; n >>= 1, beta *= beta)
    if (n & 1) result *= beta;
  return result;
}

// `step` counts this update, `variance_step` those of exp_avg_sq; `norm` and `grad_scale` are those
// of the whole gradient (0 and 1 where there are none), `own_norm` this tensor's (negative:
// gradients are not normalised by tensor).
BU_HD Coefficients coefficients_of(const UpdateRule& r, float step, float variance_step, float lr,
                                   float grad_scale, float norm, float own_norm) {
  if (!is_finite(norm) || !is_finite(grad_scale)) return {0.0f, 0.0f, 0.0f, 0.0f};
  double gradient = grad_scale;
  if (own_norm >= 0.0f) {
    gradient = own_norm > 0.0f ? 1.0 / own_norm : 0.0;
  } else if (r.max_grad_norm > 0.0) {
    const double ratio = norm * (gradient < 0.0 ? -gradient : gradient) / r.max_grad_norm;
    if (ratio > 1.0) gradient /= ratio;
  }
  double momentum = 1.0, denominator = 1.0;
  if (r.bias_correction) {
    momentum = 1.0 / (1.0 - power(r.beta1, static_cast<int64_t>(step)));
    denominator = 1.0 / sqrt(1.0 - power(r.beta2, static_cast<int64_t>(variance_step)));
  }
  return {static_cast<float>(r.maximize ? -gradient : gradient), static_cast<float>(momentum),
          static_cast<float>(denominator), lr};
}

// The root of a quotient of two sums over a tensor; 1 where either sum is 0. LAMB: |w| / |u| from
// their squares (You et al., ICLR 2020). StableAdamW: 1 / RMS from the number of elements and the
// sum of g^2 / v, at most 1 (Wortsman et al., 2023).
BU_HD float ratio_of(Ratio kind, float numerator, float denominator) {
  if (!(numerator > 0.0f && denominator > 0.0f)) return 1.0f;
  const double quotient = static_cast<double>(numerator) / denominator;
  if (kind == Ratio::kRmsClip && quotient > 1.0) return 1.0f;
  return static_cast<float>(sqrt(quotient));
}

}  // namespace bert_unpad
