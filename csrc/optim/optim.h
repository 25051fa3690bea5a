// Operators over lists of tensors: what the bindings hand to the kernels. No torch here.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "cpu/isa.h"
#include "optim/coefficients.h"

namespace bert_unpad {

// One tensor of an update: its arrays, all of `size` elements.
struct UpdateTensor {
  void* param;
  const void* grad;
  float *exp_avg, *exp_avg_sq;
  float* master;  // null: the parameter itself is what is updated
  int64_t size;
};

// What the parameters and the gradients of an update are stored in.
struct UpdateTypes {
  DType param, grad;
};

// One tensor of a norm or a scaling.
struct PlainTensor {
  void* data;
  int64_t size;
};

// Sums over a tensor between two passes. LAMB: squares of the norms of weights, of the update, and
// (Nesterov) of the update by the gradient alone. StableAdamW: elements, g^2 / max(v, eps^2), 0.
inline constexpr int kTensorSums = 3;

// What 1-bit LAMB needs of a tensor: squares of m / (sqrt(v) + eps) and of the whole update, and
// the largest ratio of the frozen denominator to the fresh one.
inline constexpr int kFrozenLambSums = 3;

struct UpdateKernels {
  // Each for elements [begin, end).
  void (*adam)(const RuleFactors&, const Coefficients&, UpdateTypes, const UpdateTensor&,
               int64_t begin, int64_t end);
  // Moments, and the sums over these elements.
  using Moments = void (*)(const RuleFactors&, const Coefficients&, UpdateTypes,
                           const UpdateTensor&, int64_t begin, int64_t end,
                           double* sums /* [kTensorSums] */);
  Moments lamb_moments, stable_adamw_moments;
  // Recomputes the update and adds it: `ratios` of the update and of the one by the gradient alone.
  void (*apply)(const RuleFactors&, const Coefficients&, UpdateTypes, const UpdateTensor&,
                const float* ratios /* [2] */, int64_t begin, int64_t end);
  // Adam with the exp_avg_sq there is.
  void (*frozen_adam)(const RuleFactors&, const Coefficients&, UpdateTypes, const UpdateTensor&,
                      int64_t begin, int64_t end);
  // `master` is the fresh exp_avg_sq, which moves on; the gradient is the new exp_avg.
  void (*frozen_lamb_sums)(const RuleFactors&, UpdateTypes, const UpdateTensor&, int64_t begin,
                           int64_t end, double* sums /* [kFrozenLambSums] */);
};
BU_ISA_TABLE(UpdateKernels, update_kernels)

struct MultiTensorKernels {
  double (*square_sum)(DType, const void* data, int64_t begin, int64_t end);
  void (*scale)(DType, void* data, float factor, int64_t begin, int64_t end);
};
BU_ISA_TABLE(MultiTensorKernels, multi_tensor_kernels)

}  // namespace bert_unpad
