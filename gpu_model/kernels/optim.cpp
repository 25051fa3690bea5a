// The operators over lists of tensors on the model of a block. Lists are arrays of pointers and
// sizes.
#include "gpu_model/block/c_api.h"
//
#include "optim/adam.cu"
#include "optim/apply_ratios.cu"
#include "optim/frozen.cu"
#include "optim/lamb.cu"
#include "optim/multi_tensor.cu"
#include "optim/stable_adamw.cu"

using bert_unpad::Coefficients;
using bert_unpad::DType;
using bert_unpad::PlainTensor;
using bert_unpad::UpdateRule;
using bert_unpad::UpdateTensor;
namespace cuda = bert_unpad::cuda;

namespace {

struct PlainLists {
  std::vector<PlainTensor> tensors;
  std::vector<DType> dtypes;

  PlainLists(int64_t count, void* const* data, const int64_t* sizes, const int64_t* kinds) {
    for (int64_t i = 0; i < count; ++i) {
      tensors.push_back({data[i], sizes[i]});
      dtypes.push_back(static_cast<DType>(kinds[i]));
    }
  }
};

// `arrays`: param, grad, exp_avg, exp_avg_sq, master (or null) and step of each tensor.
struct Lists {
  std::vector<UpdateTensor> tensors;
  std::vector<float*> steps;

  Lists(int64_t count, void* const* arrays, const int64_t* sizes) {
    for (int64_t i = 0; i < count; ++i) {
      const auto array = [&](int k) { return static_cast<float*>(arrays[6 * i + k]); };
      tensors.push_back({arrays[6 * i], arrays[6 * i + 1], array(2), array(3), array(4), sizes[i]});
      steps.push_back(array(5));
    }
  }
};

}  // namespace

BU_EXPORT int optim_norm(int64_t count, void* const* data, const int64_t* sizes,
                         const int64_t* dtypes, float* partials, float* total, float* each) {
  return bert_unpad::block_model::guarded([&] {
    const PlainLists lists(count, data, sizes, dtypes);
    cuda::multi_tensor_l2norm(lists.tensors, lists.dtypes, partials, total, each, nullptr);
  });
}

BU_EXPORT int optim_scale(int64_t count, void* const* data, const int64_t* sizes,
                          const int64_t* dtypes, const float* factor) {
  return bert_unpad::block_model::guarded([&] {
    const PlainLists lists(count, data, sizes, dtypes);
    cuda::multi_tensor_scale(lists.tensors, lists.dtypes, factor, nullptr);
  });
}

// `numbers`: beta1, beta2, eps, weight_decay, max_grad_norm; `flags`: decoupled, bias_correction,
// grad_averaging, ratio (0: one, 1: LAMB's, 2: StableAdamW's), nesterov, maximize. Adam where
// there are no `sums`, else the first pass, which leaves them and `coefficients`, the second, or
// both.
BU_EXPORT int optim_update(int64_t count, void* const* arrays, const int64_t* sizes,
                           int64_t param_dtype, int64_t grad_dtype, const double* numbers,
                           const int64_t* flags, const float* lr, const float* grad_scale,
                           const float* norm, const float* own_norms, int64_t* skipped,
                           float* coefficients, float* partials, float* sums, int first,
                           int second) {
  return bert_unpad::block_model::guarded([&] {
    const Lists lists(count, arrays, sizes);
    const UpdateRule rule{numbers[0],    numbers[1],    numbers[2],
                          numbers[3],    numbers[4],    flags[0] != 0,
                          flags[1] != 0, flags[2] != 0, static_cast<bert_unpad::Ratio>(flags[3]),
                          flags[4] != 0, flags[5] != 0};
    auto* rows = reinterpret_cast<Coefficients*>(coefficients);
    if (first)
      cuda::advance_steps("test", rule, lists.steps,
                          {lr, false, nullptr, grad_scale, norm, own_norms, skipped}, rows,
                          nullptr);
    const cuda::UpdateCall call{
        "test",        rule, static_cast<DType>(param_dtype), static_cast<DType>(grad_dtype),
        lists.tensors, rows};
    if (sums == nullptr) return cuda::adam(call, nullptr);
    const auto moments =
        rule.ratio == bert_unpad::Ratio::kRmsClip ? cuda::stable_adamw_moments : cuda::lamb_moments;
    if (first) moments(call, partials, sums, nullptr);
    if (second) cuda::apply_ratios(call, sums, nullptr);
  });
}

// `arrays` as above; `numbers`: beta1, beta2, eps, weight_decay; `flags`: lr_each, averaged,
// bias_correction.
BU_EXPORT int optim_frozen_adam(int64_t count, void* const* arrays, const int64_t* sizes,
                                int64_t param_dtype, int64_t grad_dtype, const double* numbers,
                                const int64_t* flags, const float* lr, const float* variance_step,
                                const float* grad_scale, const float* norm, int64_t* skipped,
                                float* coefficients) {
  return bert_unpad::block_model::guarded([&] {
    const Lists lists(count, arrays, sizes);
    UpdateRule rule = bert_unpad::adam_rule(numbers[0], numbers[1], numbers[2], numbers[3], 0.0,
                                            true, flags[2] != 0, false);
    rule.averaged = flags[1] != 0;
    auto* rows = reinterpret_cast<Coefficients*>(coefficients);
    cuda::advance_steps("test", rule, lists.steps,
                        {lr, flags[0] != 0, variance_step, grad_scale, norm, nullptr, skipped},
                        rows, nullptr);
    cuda::frozen_adam({"test", rule, static_cast<DType>(param_dtype),
                       static_cast<DType>(grad_dtype), lists.tensors, rows},
                      nullptr);
  });
}

// In the place of the masters, the fresh variances.
BU_EXPORT int optim_frozen_lamb_sums(int64_t count, void* const* arrays, const int64_t* sizes,
                                     int64_t param_dtype, const double* numbers, const float* norm,
                                     float* partials, float* sums) {
  return bert_unpad::block_model::guarded([&] {
    const Lists lists(count, arrays, sizes);
    const UpdateRule rule = bert_unpad::lamb_rule(numbers[0], numbers[1], numbers[2], numbers[3],
                                                  0.0, true, false, true, false, false);
    cuda::frozen_lamb_sums(
        {"test", rule, static_cast<DType>(param_dtype), DType::kFloat32, lists.tensors, nullptr},
        norm, partials, sums, nullptr);
  });
}
