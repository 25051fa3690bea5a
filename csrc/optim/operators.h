// The operators over lists of tensors, from their arguments to one call of a device's kernels.
//
// Each device has a class `Device`. A comment above each operator names the members it calls. The
// constructor, Device(op, like), makes the device of the tensor `like` current.
#pragma once

#include <optional>
#include <tuple>

#include "common/allocate.h"
#include "optim/arguments.h"

namespace bert_unpad {

//   l2norm(list, total, each)  into float32 [] and [tensors]
template <class Device>
std::tuple<Tensor, Tensor> multi_tensor_l2norm(Tensors tensors) {
  const char* op = "multi_tensor_l2norm";
  check(!tensors.empty(), op, ": tensors must not be empty");
  const PlainList list(tensors, op);
  const Device device(op, tensors[0]);
  const auto count = static_cast<int64_t>(tensors.size());
  Tensor total = allocate(tensors[0], {}, ScalarType::Float);
  Tensor each = allocate(tensors[0], {count}, ScalarType::Float);
  device.l2norm(list, total, each);
  return {total, each};
}

//   scale(list, factor)
template <class Device>
void multi_tensor_scale_(Tensors tensors, Tensor factor) {
  const char* op = "multi_tensor_scale_";
  if (tensors.empty()) return;
  const PlainList list(tensors, op);
  check_scalar(factor, tensors[0], op, "factor");
  Device(op, tensors[0]).scale(list, factor.const_data_ptr<float>());
}

// What an update works on, checked.
struct Update {
  const UpdateRule& rule;
  const UpdateList& list;
  const UpdateScalars& scalars;
  const float* own_norms;                // null: gradients are not normalised by tensor
  const float* variance_step = nullptr;  // updates of exp_avg_sq; null: as many as steps
};

//   adam(update)
template <class Device>
void adam_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors masters,
           Tensors steps, Tensor lr, std::optional<Tensor> grad_scale, std::optional<Tensor> norm,
           std::optional<Tensor> skipped, double beta1, double beta2, double eps,
           double weight_decay, double max_grad_norm, bool decoupled, bool bias_correction,
           bool maximize) {
  const char* op = "adam_";
  const UpdateRule rule = adam_rule(beta1, beta2, eps, weight_decay, max_grad_norm, decoupled,
                                    bias_correction, maximize);
  check_rule(rule, op);
  const UpdateList list(params, grads, exp_avgs, exp_avg_sqs, masters, &steps, op);
  if (params.empty()) return;
  const UpdateScalars scalars{lr, grad_scale, norm, skipped};
  scalars.check_all(params[0], rule, op);
  Device(op, params[0]).adam({rule, list, scalars, nullptr});
}

// The operators of two passes. Their `Device` has
//   both(update)
//   moments(update, sums, rows)    into float32 [tensors, kTensorSums] and [tensors, 4]
//   apply(rule, list, sums, rows)
//
// f(device, update), unless there is nothing to do.
template <class Device, class F>
void begin_two_passes(const char* op, const UpdateRule& rule, const Tensors& params,
                      const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
                      const Tensors& masters, const Tensors& steps, const UpdateScalars& scalars,
                      const std::optional<Tensor>& grad_norms, const F& f) {
  check_rule(rule, op);
  const UpdateList list(params, grads, exp_avgs, exp_avg_sqs, masters, &steps, op);
  const float* norms = own_norms(grad_norms, params, rule, op);
  if (params.empty()) return;
  scalars.check_all(params[0], rule, op);
  f(Device(op, params[0]), Update{rule, list, scalars, norms});
}

template <class Device>
void two_passes(const char* op, const UpdateRule& rule, const Tensors& params, const Tensors& grads,
                const Tensors& exp_avgs, const Tensors& exp_avg_sqs, const Tensors& masters,
                const Tensors& steps, const UpdateScalars& scalars,
                const std::optional<Tensor>& grad_norms) {
  begin_two_passes<Device>(op, rule, params, grads, exp_avgs, exp_avg_sqs, masters, steps, scalars,
                           grad_norms,
                           [](const Device& device, const Update& update) { device.both(update); });
}

template <class Device>
std::tuple<Tensor, Tensor> first_pass(const char* op, const UpdateRule& rule, const Tensors& params,
                                      const Tensors& grads, const Tensors& exp_avgs,
                                      const Tensors& exp_avg_sqs, const Tensors& masters,
                                      const Tensors& steps, const UpdateScalars& scalars,
                                      const std::optional<Tensor>& grad_norms) {
  const auto count = static_cast<int64_t>(params.size());
  Tensor sums = allocate(scalars.lr, {count, kTensorSums}, ScalarType::Float);
  Tensor rows = allocate(scalars.lr, {count, 4}, ScalarType::Float);
  begin_two_passes<Device>(
      op, rule, params, grads, exp_avgs, exp_avg_sqs, masters, steps, scalars, grad_norms,
      [&](const Device& device, const Update& update) { device.moments(update, sums, rows); });
  return {sums, rows};
}

template <class Device>
void second_pass(const char* op, const UpdateRule& rule, const Tensors& params,
                 const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
                 const Tensors& masters, const Tensor& sums, const Tensor& coefficients) {
  check_rule(rule, op);
  const UpdateList list(params, grads, exp_avgs, exp_avg_sqs, masters, nullptr, op);
  const float* sum_rows = rows_of(sums, params, kTensorSums, op, "sums");
  const float* rows = rows_of(coefficients, params, 4, op, "coefficients");
  if (params.empty()) return;
  Device(op, params[0]).apply(rule, list, sum_rows, rows);
}

template <class Device>
void lamb_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors masters,
           Tensors steps, Tensor lr, std::optional<Tensor> grad_scale, std::optional<Tensor> norm,
           std::optional<Tensor> grad_norms, std::optional<Tensor> skipped, double beta1,
           double beta2, double eps, double weight_decay, double max_grad_norm, bool grad_averaging,
           bool bias_correction, bool trust_ratio, bool nesterov, bool maximize) {
  const UpdateRule rule = lamb_rule(beta1, beta2, eps, weight_decay, max_grad_norm, grad_averaging,
                                    bias_correction, trust_ratio, nesterov, maximize);
  two_passes<Device>("lamb_", rule, params, grads, exp_avgs, exp_avg_sqs, masters, steps,
                     {lr, grad_scale, norm, skipped}, grad_norms);
}

template <class Device>
std::tuple<Tensor, Tensor> lamb_moments_(
    Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors masters,
    Tensors steps, Tensor lr, std::optional<Tensor> grad_scale, std::optional<Tensor> norm,
    std::optional<Tensor> grad_norms, std::optional<Tensor> skipped, double beta1, double beta2,
    double eps, double weight_decay, double max_grad_norm, bool grad_averaging,
    bool bias_correction, bool nesterov, bool maximize) {
  const UpdateRule rule = lamb_rule(beta1, beta2, eps, weight_decay, max_grad_norm, grad_averaging,
                                    bias_correction, true, nesterov, maximize);
  return first_pass<Device>("lamb_moments_", rule, params, grads, exp_avgs, exp_avg_sqs, masters,
                            steps, {lr, grad_scale, norm, skipped}, grad_norms);
}

template <class Device>
void lamb_apply_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs,
                 Tensors masters, Tensor sums, Tensor coefficients, double beta1, double eps,
                 double weight_decay, bool trust_ratio, bool nesterov) {
  const UpdateRule rule =
      lamb_rule(beta1, 0.0, eps, weight_decay, 0.0, true, false, trust_ratio, nesterov, false);
  second_pass<Device>("lamb_apply_", rule, params, grads, exp_avgs, exp_avg_sqs, masters, sums,
                      coefficients);
}

template <class Device>
void stable_adamw_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs,
                   Tensors masters, Tensors steps, Tensor lr, std::optional<Tensor> grad_scale,
                   std::optional<Tensor> norm, std::optional<Tensor> skipped, double beta1,
                   double beta2, double eps, double weight_decay, double max_grad_norm,
                   bool maximize) {
  const UpdateRule rule =
      stable_adamw_rule(beta1, beta2, eps, weight_decay, max_grad_norm, maximize);
  two_passes<Device>("stable_adamw_", rule, params, grads, exp_avgs, exp_avg_sqs, masters, steps,
                     {lr, grad_scale, norm, skipped}, std::nullopt);
}

template <class Device>
std::tuple<Tensor, Tensor> stable_adamw_moments_(
    Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors masters,
    Tensors steps, Tensor lr, std::optional<Tensor> grad_scale, std::optional<Tensor> norm,
    std::optional<Tensor> skipped, double beta1, double beta2, double eps, double weight_decay,
    double max_grad_norm, bool maximize) {
  const UpdateRule rule =
      stable_adamw_rule(beta1, beta2, eps, weight_decay, max_grad_norm, maximize);
  return first_pass<Device>("stable_adamw_moments_", rule, params, grads, exp_avgs, exp_avg_sqs,
                            masters, steps, {lr, grad_scale, norm, skipped}, std::nullopt);
}

template <class Device>
void stable_adamw_apply_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs,
                         Tensors masters, Tensor sums, Tensor coefficients, double eps,
                         double weight_decay) {
  const UpdateRule rule = stable_adamw_rule(0.0, 0.0, eps, weight_decay, 0.0, false);
  second_pass<Device>("stable_adamw_apply_", rule, params, grads, exp_avgs, exp_avg_sqs, masters,
                      sums, coefficients);
}

//   frozen_adam(update)
template <class Device>
void frozen_adam_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs,
                  Tensors masters, Tensors steps, std::optional<Tensor> variance_step, Tensor lr,
                  std::optional<Tensor> grad_scale, std::optional<Tensor> norm,
                  std::optional<Tensor> skipped, double beta1, double beta2, double eps,
                  double weight_decay, bool averaged, bool bias_correction) {
  const char* op = "frozen_adam_";
  UpdateRule rule = adam_rule(beta1, beta2, eps, weight_decay, 0.0, true, bias_correction, false);
  rule.averaged = averaged;
  check_rule(rule, op);
  const UpdateList list(params, grads, exp_avgs, exp_avg_sqs, masters, &steps, op);
  if (params.empty()) return;
  const UpdateScalars scalars{lr, grad_scale, norm, skipped};
  scalars.check_all(params[0], rule, op, static_cast<int64_t>(params.size()));
  if (variance_step) check_scalar(*variance_step, params[0], op, "variance_step");
  const float* counted = variance_step ? variance_step->const_data_ptr<float>() : nullptr;
  Device(op, params[0]).frozen_adam({rule, list, scalars, nullptr, counted});
}

//   frozen_lamb_sums(rule, list, norm, sums)  into float32 [tensors, kFrozenLambSums]
template <class Device>
Tensor frozen_lamb_sums_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs,
                         Tensors fresh_sqs, std::optional<Tensor> norm, double beta1, double beta2,
                         double eps, double weight_decay) {
  const char* op = "frozen_lamb_sums_";
  check(!params.empty(), op, ": params must not be empty");
  const UpdateRule rule =
      lamb_rule(beta1, beta2, eps, weight_decay, 0.0, true, false, true, false, false);
  check_rule(rule, op);
  UpdateList list(params, grads, exp_avgs, exp_avg_sqs, {}, nullptr, op);
  list.add_fresh(fresh_sqs, params, op);
  if (norm) check_scalar(*norm, params[0], op, "norm");
  Tensor sums = allocate(params[0], {static_cast<int64_t>(params.size()), kFrozenLambSums},
                         ScalarType::Float);
  Device(op, params[0])
      .frozen_lamb_sums(rule, list, norm ? norm->const_data_ptr<float>() : nullptr, sums);
  return sums;
}

}  // namespace bert_unpad
