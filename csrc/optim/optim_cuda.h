// Operators over lists of tensors on a GPU: what the bindings hand to the kernels. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "optim/optim.h"

namespace bert_unpad::cuda {

// Squared norms by chunk; as many rows as `multi_tensor_chunks` says.
int64_t multi_tensor_chunks(const std::vector<PlainTensor>& tensors);
int64_t update_chunks(const std::vector<UpdateTensor>& tensors);

// total [1], each [tensors]. `partials` is scratch memory, a float a chunk. Two stages, each in a
// fixed order: the same inputs give the same bits.
void multi_tensor_l2norm(const std::vector<PlainTensor>& tensors, const std::vector<DType>& dtypes,
                         float* partials, float* total, float* each, cudaStream_t stream);

void multi_tensor_scale(const std::vector<PlainTensor>& tensors, const std::vector<DType>& dtypes,
                        const float* factor, cudaStream_t stream);

// What an update's coefficients come from, on the device.
struct DeviceScalars {
  const float* lr;
  bool lr_each;                // one a tensor
  const float* variance_step;  // null: as many as steps
  const float* grad_scale;     // null: 1
  const float* norm;           // null: nothing is checked
  const float* own_norms;      // null: gradients are not normalised by tensor
  int64_t* skipped;            // null: not counted
};

// Moves the steps on, unless the update is skipped, and computes the coefficients [tensors].
void advance_steps(const char* op, const UpdateRule& rule, const std::vector<float*>& steps,
                   const DeviceScalars& scalars, Coefficients* coefficients, cudaStream_t stream);

// A list of tensors under one rule.
struct UpdateCall {
  const char* op;
  UpdateRule rule;
  DType param_dtype, grad_dtype;
  const std::vector<UpdateTensor>& tensors;
  const Coefficients* coefficients;
};

void adam(const UpdateCall& call, cudaStream_t stream);

// Moments, and sums [tensors, kTensorSums] by way of partials [chunks, kTensorSums].
void lamb_moments(const UpdateCall& call, float* partials, float* sums, cudaStream_t stream);
void stable_adamw_moments(const UpdateCall& call, float* partials, float* sums,
                          cudaStream_t stream);
// The second pass of LAMB and StableAdamW: recomputes the update and adds it.
void apply_ratios(const UpdateCall& call, const float* sums, cudaStream_t stream);

void frozen_adam(const UpdateCall& call, cudaStream_t stream);

// Sums [tensors, kFrozenLambSums] by way of partials [chunks, kFrozenLambSums]; `norm` may be null.
// The call has no coefficients.
void frozen_lamb_sums(const UpdateCall& call, const float* norm, float* partials, float* sums,
                      cudaStream_t stream);

}  // namespace bert_unpad::cuda
