// The operators over lists of tensors on a GPU: scratch memory, stream, kernels.
#include "optim/optim_cuda.h"
#include "common/allocate.h"

#include "cuda/binding.h"
#include "optim/operators.h"

namespace bert_unpad::cuda {
namespace {

const float* pointer(const std::optional<Tensor>& t) {
  return t ? t->const_data_ptr<float>() : nullptr;
}

class Lists {
 public:
  Lists(const char* op, const Tensor& like) : op_(op), like_(like), call_(like, op) {}

  void l2norm(const PlainList& list, Tensor& total, Tensor& each) const {
    Tensor partials = empty({multi_tensor_chunks(list.tensors)});
    multi_tensor_l2norm(list.tensors, list.dtypes, partials.mutable_data_ptr<float>(),
                        total.mutable_data_ptr<float>(), each.mutable_data_ptr<float>(),
                        call_.stream);
  }

  void scale(const PlainList& list, const float* factor) const {
    multi_tensor_scale(list.tensors, list.dtypes, factor, call_.stream);
  }

  void adam(const Update& update) const {
    Tensor rows = empty_rows(update, 4);
    advance(update, rows);
    cuda::adam(update_call(update.rule, update.list, rows.const_data_ptr<float>()), call_.stream);
  }

  void both(const Update& update) const {
    Tensor sums = empty_rows(update, kTensorSums), rows = empty_rows(update, 4);
    moments(update, sums, rows);
    apply(update.rule, update.list, sums.const_data_ptr<float>(), rows.const_data_ptr<float>());
  }

  void moments(const Update& update, Tensor& sums, Tensor& rows) const {
    advance(update, rows);
    Tensor partials = empty({update_chunks(update.list.tensors), kTensorSums});
    const auto pass = update.rule.ratio == Ratio::kRmsClip ? stable_adamw_moments : lamb_moments;
    pass(update_call(update.rule, update.list, rows.const_data_ptr<float>()),
         partials.mutable_data_ptr<float>(), sums.mutable_data_ptr<float>(), call_.stream);
  }

  void apply(const UpdateRule& rule, const UpdateList& list, const float* sums,
             const float* rows) const {
    cuda::apply_ratios(update_call(rule, list, rows), sums, call_.stream);
  }

  void frozen_adam(const Update& update) const {
    Tensor rows = empty_rows(update, 4);
    advance(update, rows);
    cuda::frozen_adam(update_call(update.rule, update.list, rows.const_data_ptr<float>()),
                      call_.stream);
  }

  void frozen_lamb_sums(const UpdateRule& rule, const UpdateList& list, const float* norm,
                        Tensor& sums) const {
    Tensor partials = empty({update_chunks(list.tensors), kFrozenLambSums});
    cuda::frozen_lamb_sums(update_call(rule, list, nullptr), norm,
                           partials.mutable_data_ptr<float>(), sums.mutable_data_ptr<float>(),
                           call_.stream);
  }

 private:
  Tensor empty(std::initializer_list<int64_t> sizes) const {
    return allocate(like_, sizes, ScalarType::Float);
  }
  Tensor empty_rows(const Update& update, int64_t width) const {
    return empty({static_cast<int64_t>(update.list.tensors.size()), width});
  }

  // Steps, and the coefficients of this step, float32 [tensors, 4].
  void advance(const Update& update, Tensor& rows) const {
    const UpdateScalars& s = update.scalars;
    const DeviceScalars scalars{s.lr.const_data_ptr<float>(),
                                s.lr.numel() > 1,
                                update.variance_step,
                                pointer(s.grad_scale),
                                pointer(s.norm),
                                update.own_norms,
                                s.skipped ? s.skipped->mutable_data_ptr<int64_t>() : nullptr};
    advance_steps(op_, update.rule, update.list.steps, scalars,
                  static_cast<Coefficients*>(rows.mutable_data_ptr()), call_.stream);
  }

  UpdateCall update_call(const UpdateRule& rule, const UpdateList& list, const float* rows) const {
    return {op_,
            rule,
            list.param_dtype,
            list.grad_dtype,
            list.tensors,
            reinterpret_cast<const Coefficients*>(rows)};
  }

  const char* op_;
  const Tensor& like_;
  const Call call_;
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("multi_tensor_l2norm", TORCH_BOX(&bert_unpad::multi_tensor_l2norm<Lists>));
  m.impl("multi_tensor_scale_", TORCH_BOX(&multi_tensor_scale_<Lists>));
  m.impl("adam_", TORCH_BOX(&adam_<Lists>));
  m.impl("lamb_", TORCH_BOX(&lamb_<Lists>));
  m.impl("lamb_moments_", TORCH_BOX(&lamb_moments_<Lists>));
  m.impl("lamb_apply_", TORCH_BOX(&lamb_apply_<Lists>));
  m.impl("stable_adamw_", TORCH_BOX(&stable_adamw_<Lists>));
  m.impl("stable_adamw_moments_", TORCH_BOX(&stable_adamw_moments_<Lists>));
  m.impl("stable_adamw_apply_", TORCH_BOX(&stable_adamw_apply_<Lists>));
  m.impl("frozen_adam_", TORCH_BOX(&frozen_adam_<Lists>));
  m.impl("frozen_lamb_sums_", TORCH_BOX(&frozen_lamb_sums_<Lists>));
}

}  // namespace bert_unpad::cuda
