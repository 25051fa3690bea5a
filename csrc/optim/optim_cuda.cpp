// CUDA bindings of the operators over lists of tensors: checks, scratch memory, stream.
#include "optim/optim_cuda.h"

#include <tuple>

#include "cuda/binding.h"
#include "optim/arguments.h"

namespace bert_unpad::cuda {
namespace {

std::tuple<Tensor, Tensor> l2norm(Tensors tensors) {
  const char* op = "multi_tensor_l2norm";
  const PlainList list(tensors, op);
  const Call call(tensors[0], op);
  const auto empty = [&](std::initializer_list<int64_t> sizes) {
    return torch::stable::new_empty(tensors[0], sizes, ScalarType::Float);
  };
  Tensor total = empty({}), each = empty({static_cast<int64_t>(tensors.size())});
  Tensor partials = empty({multi_tensor_chunks(list.tensors)});
  multi_tensor_l2norm(list.tensors, list.dtypes, partials.mutable_data_ptr<float>(),
                      total.mutable_data_ptr<float>(), each.mutable_data_ptr<float>(), call.stream);
  return {total, each};
}

void scale_(Tensors tensors, Tensor factor) {
  const char* op = "multi_tensor_scale_";
  if (tensors.empty()) return;
  const PlainList list(tensors, op);
  check_scalar(factor, tensors[0], op, "factor");
  const Call call(tensors[0], op);
  multi_tensor_scale(list.tensors, list.dtypes, factor.const_data_ptr<float>(), call.stream);
}

const float* pointer(const std::optional<Tensor>& t) {
  return t ? t->const_data_ptr<float>() : nullptr;
}

// Steps and coefficients float32 [tensors, 4].
Tensor coefficients_of_step(const char* op, const UpdateRule& rule, const UpdateList& list,
                            const UpdateScalars& scalars, const float* own_norms,
                            cudaStream_t stream) {
  Tensor out = torch::stable::new_empty(scalars.lr, {static_cast<int64_t>(list.tensors.size()), 4},
                                        ScalarType::Float);
  const DeviceScalars device{
      scalars.lr.const_data_ptr<float>(), pointer(scalars.grad_scale), pointer(scalars.norm),
      own_norms, scalars.skipped ? scalars.skipped->mutable_data_ptr<int64_t>() : nullptr};
  advance_steps(op, rule, list.steps, device, static_cast<Coefficients*>(out.mutable_data_ptr()),
                stream);
  return out;
}

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
  const Call call(params[0], op);
  Tensor rows = coefficients_of_step(op, rule, list, scalars, nullptr, call.stream);
  adam({op, rule, list.param_dtype, list.grad_dtype, list.tensors,
        static_cast<const Coefficients*>(rows.const_data_ptr())},
       call.stream);
}

std::tuple<Tensor, Tensor> moments(const char* op, const UpdateRule& rule, const Tensors& params,
                                   const UpdateList& list, const UpdateScalars& scalars,
                                   const std::optional<Tensor>& grad_norms, cudaStream_t stream) {
  const float* norms = own_norms(grad_norms, params, rule, op);
  scalars.check_all(params[0], rule, op);
  Tensor rows = coefficients_of_step(op, rule, list, scalars, norms, stream);
  const auto empty = [&](int64_t count) {
    return torch::stable::new_empty(scalars.lr, {count, kLambSums}, ScalarType::Float);
  };
  Tensor sums = empty(static_cast<int64_t>(params.size()));
  Tensor partials = empty(update_chunks(list.tensors));
  lamb_moments({op, rule, list.param_dtype, list.grad_dtype, list.tensors,
                static_cast<const Coefficients*>(rows.const_data_ptr())},
               partials.mutable_data_ptr<float>(), sums.mutable_data_ptr<float>(), stream);
  return {sums, rows};
}

void lamb_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors masters,
           Tensors steps, Tensor lr, std::optional<Tensor> grad_scale, std::optional<Tensor> norm,
           std::optional<Tensor> grad_norms, std::optional<Tensor> skipped, double beta1,
           double beta2, double eps, double weight_decay, double max_grad_norm, bool grad_averaging,
           bool bias_correction, bool trust_ratio, bool nesterov, bool maximize) {
  const char* op = "lamb_";
  const UpdateRule rule = lamb_rule(beta1, beta2, eps, weight_decay, max_grad_norm, grad_averaging,
                                    bias_correction, trust_ratio, nesterov, maximize);
  check_rule(rule, op);
  const UpdateList list(params, grads, exp_avgs, exp_avg_sqs, masters, &steps, op);
  if (params.empty()) return;
  const Call call(params[0], op);
  const auto [sums, rows] =
      moments(op, rule, params, list, {lr, grad_scale, norm, skipped}, grad_norms, call.stream);
  lamb_apply({op, rule, list.param_dtype, list.grad_dtype, list.tensors,
              static_cast<const Coefficients*>(rows.const_data_ptr())},
             sums.const_data_ptr<float>(), call.stream);
}

std::tuple<Tensor, Tensor> lamb_moments_(
    Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors masters,
    Tensors steps, Tensor lr, std::optional<Tensor> grad_scale, std::optional<Tensor> norm,
    std::optional<Tensor> grad_norms, std::optional<Tensor> skipped, double beta1, double beta2,
    double eps, double weight_decay, double max_grad_norm, bool grad_averaging,
    bool bias_correction, bool nesterov, bool maximize) {
  const char* op = "lamb_moments_";
  const UpdateRule rule = lamb_rule(beta1, beta2, eps, weight_decay, max_grad_norm, grad_averaging,
                                    bias_correction, true, nesterov, maximize);
  check_rule(rule, op);
  const UpdateList list(params, grads, exp_avgs, exp_avg_sqs, masters, &steps, op);
  if (params.empty())
    return {torch::stable::new_empty(lr, {0, kLambSums}), torch::stable::new_empty(lr, {0, 4})};
  const Call call(params[0], op);
  return moments(op, rule, params, list, {lr, grad_scale, norm, skipped}, grad_norms, call.stream);
}

void lamb_apply_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs,
                 Tensors masters, Tensor sums, Tensor coefficients, double beta1, double eps,
                 double weight_decay, bool trust_ratio, bool nesterov) {
  const char* op = "lamb_apply_";
  const UpdateRule rule =
      lamb_rule(beta1, 0.0, eps, weight_decay, 0.0, true, false, trust_ratio, nesterov, false);
  check_rule(rule, op);
  const UpdateList list(params, grads, exp_avgs, exp_avg_sqs, masters, nullptr, op);
  if (params.empty()) return;
  const float* squares = rows_of(sums, params, kLambSums, op, "sums");
  rows_of(coefficients, params, 4, op, "coefficients");
  const Call call(params[0], op);
  lamb_apply({op, rule, list.param_dtype, list.grad_dtype, list.tensors,
              static_cast<const Coefficients*>(coefficients.const_data_ptr())},
             squares, call.stream);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("multi_tensor_l2norm", TORCH_BOX(&l2norm));
  m.impl("multi_tensor_scale_", TORCH_BOX(&scale_));
  m.impl("adam_", TORCH_BOX(&adam_));
  m.impl("lamb_", TORCH_BOX(&lamb_));
  m.impl("lamb_moments_", TORCH_BOX(&lamb_moments_));
  m.impl("lamb_apply_", TORCH_BOX(&lamb_apply_));
}

}  // namespace bert_unpad::cuda
