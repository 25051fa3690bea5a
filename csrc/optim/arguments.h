// Checks of the arguments of the operators over lists of tensors, the same on CPU and GPU.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "common/checks.h"
#include "optim/optim.h"

namespace bert_unpad {

using Tensors = std::vector<Tensor>;

inline std::string element_name(const char* name, size_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

// One tensor of `list` beside the parameter of the same number: its size and device, contiguous.
inline void check_element(const Tensor& t, const Tensor& param, const char* op, const char* name,
                          size_t i) {
  const std::string full = element_name(name, i);
  check(t.numel() == param.numel(), op, ": ", full, " must have the shape of params[", i, "], ",
        ShapeOf(param), ", got ", ShapeOf(t));
  check_contiguous(t, op, full.c_str());
  check_same_device(t, param, op, full.c_str());
}

// The tensors of a norm or a scaling, checked; their dtypes may differ.
struct PlainList {
  std::vector<PlainTensor> tensors;
  std::vector<DType> dtypes;

  PlainList(const Tensors& list, const char* op) {
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string name = element_name("tensors", i);
      dtypes.push_back(storage_dtype(list[i], op, name.c_str()));
      check_contiguous(list[i], op, name.c_str());
      check_same_device(list[i], list[0], op, name.c_str());
      tensors.push_back({const_cast<void*>(list[i].const_data_ptr()), list[i].numel()});
    }
  }
};

// A float32 scalar on the device of `like`.
inline void check_scalar(const Tensor& t, const Tensor& like, const char* op, const char* name) {
  check_scalar(t, ScalarType::Float, like, op, name, "float32");
}

// The scalar arguments of the updates.
struct UpdateScalars {
  Tensor lr;
  std::optional<Tensor> grad_scale, norm, skipped;

  // `tensors`: how many learning rates there may be, where there may be one a tensor.
  void check_all(const Tensor& like, const UpdateRule& rule, const char* op,
                 int64_t tensors = 1) const {
    if (lr.numel() != 1 && lr.numel() == tensors) {
      check_shape(lr, {tensors}, op, "lr", "[] or [tensors]");
      check_dtype(lr, ScalarType::Float, op, "lr", "float32");
      check_contiguous(lr, op, "lr");
      check_same_device(lr, like, op, "lr");
    } else {
      check_scalar(lr, like, op, "lr");
    }
    if (grad_scale) check_scalar(*grad_scale, like, op, "grad_scale");
    if (norm) check_scalar(*norm, like, op, "norm");
    check(norm.has_value() || rule.max_grad_norm == 0.0, op, ": max_grad_norm needs norm");
    if (skipped) check_scalar(*skipped, ScalarType::Long, like, op, "skipped", "int64");
  }
};

inline void check_rule(const UpdateRule& r, const char* op) {
  check(r.beta1 >= 0.0 && r.beta1 < 1.0, op, ": beta1 must be in [0, 1), got ", r.beta1);
  check(r.beta2 >= 0.0 && r.beta2 < 1.0, op, ": beta2 must be in [0, 1), got ", r.beta2);
  check(r.eps >= 0.0, op, ": eps must be >= 0, got ", r.eps);
  check(r.weight_decay >= 0.0, op, ": weight_decay must be >= 0, got ", r.weight_decay);
  check(r.max_grad_norm >= 0.0, op, ": max_grad_norm must be >= 0, got ", r.max_grad_norm);
}

// The arrays of an update, checked.
struct UpdateList {
  DType param_dtype = DType::kFloat32, grad_dtype = DType::kFloat32;
  std::vector<UpdateTensor> tensors;
  std::vector<float*> steps;  // empty where `steps` was left out

  UpdateList(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
             const Tensors& exp_avg_sqs, const Tensors& masters, const Tensors* step_tensors,
             const char* op) {
    check_count(grads, params, op, "grads");
    check_count(exp_avgs, params, op, "exp_avgs");
    check_count(exp_avg_sqs, params, op, "exp_avg_sqs");
    if (!masters.empty()) check_count(masters, params, op, "masters");
    if (step_tensors) check_count(*step_tensors, params, op, "steps");
    if (params.empty()) return;
    param_dtype = storage_dtype(params[0], op, "params[0]");
    grad_dtype = storage_dtype(grads[0], op, "grads[0]");
    check(param_dtype == grad_dtype || param_dtype == DType::kFloat32 ||
              grad_dtype == DType::kFloat32,
          op, ": grads must be float32 or of the params' dtype");
    check(masters.empty() || param_dtype != DType::kFloat32, op,
          ": masters are for parameters of 16 bits");
    tensors.reserve(params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      const Tensor& p = params[i];
      check_contiguous(p, op, element_name("params", i).c_str());
      check_same_device(p, params[0], op, element_name("params", i).c_str());
      check(p.scalar_type() == params[0].scalar_type(), op, ": ", element_name("params", i),
            " must have the dtype of params[0]");
      check(grads[i].scalar_type() == grads[0].scalar_type(), op, ": ", element_name("grads", i),
            " must have the dtype of grads[0]");
      check_element(grads[i], p, op, "grads", i);
      tensors.push_back(
          {p.mutable_data_ptr(), grads[i].const_data_ptr(),
           state(exp_avgs[i], p, op, "exp_avgs", i), state(exp_avg_sqs[i], p, op, "exp_avg_sqs", i),
           masters.empty() ? nullptr : state(masters[i], p, op, "masters", i), p.numel()});
      if (step_tensors) {
        const Tensor& step = (*step_tensors)[i];
        check_scalar(step, p, op, element_name("steps", i).c_str());
        steps.push_back(step.mutable_data_ptr<float>());
      }
    }
  }

  // 1-bit LAMB's second average of squares, in the place of the masters, which it has none of.
  void add_fresh(const Tensors& fresh_sqs, const Tensors& params, const char* op) {
    check_count(fresh_sqs, params, op, "fresh_sqs");
    for (size_t i = 0; i < tensors.size(); ++i)
      tensors[i].master = state(fresh_sqs[i], params[i], op, "fresh_sqs", i);
  }

 private:
  static void check_count(const Tensors& list, const Tensors& params, const char* op,
                          const char* name) {
    check(list.size() == params.size(), op, ": ", name, " must have as many tensors as params, ",
          params.size(), ", got ", list.size());
  }
  static float* state(const Tensor& t, const Tensor& param, const char* op, const char* name,
                      size_t i) {
    check_element(t, param, op, name, i);
    check_dtype(t, ScalarType::Float, op, element_name(name, i).c_str(), "float32");
    return t.mutable_data_ptr<float>();
  }
};

// Norms by tensor, as multi_tensor_l2norm gives them: float32 [tensors]; null where there are none.
inline const float* own_norms(const std::optional<Tensor>& t, const Tensors& params,
                              const UpdateRule& rule, const char* op) {
  check(t.has_value() == rule.nesterov, op, ": grad_norms go with nesterov");
  if (!t) return nullptr;
  check_shape(*t, {static_cast<int64_t>(params.size())}, op, "grad_norms", "[tensors]");
  check_dtype(*t, ScalarType::Float, op, "grad_norms", "float32");
  check_contiguous(*t, op, "grad_norms");
  if (!params.empty()) check_same_device(*t, params[0], op, "grad_norms");
  return t->const_data_ptr<float>();
}

// What a first pass hands to the second: float32 [tensors, width].
inline const float* rows_of(const Tensor& t, const Tensors& params, int64_t width, const char* op,
                            const char* name) {
  check_shape(t, {static_cast<int64_t>(params.size()), width}, op, name,
              width == kTensorSums ? "[tensors, 3]" : "[tensors, 4]");
  check_dtype(t, ScalarType::Float, op, name, "float32");
  check_contiguous(t, op, name);
  if (!params.empty()) check_same_device(t, params[0], op, name);
  return t.const_data_ptr<float>();
}

}  // namespace bert_unpad
