// CUDA bindings of the cross-entropy of masked tokens: checks, outputs, stream.
#include "loss/loss_cuda.h"
#include "common/allocate.h"

#include <limits>
#include <tuple>

#include "cuda/binding.h"
#include "loss/arguments.h"

namespace bert_unpad::cuda {
namespace {

LossCudaParams make_params(const Tensor& logits, const Tensor& labels, int64_t vocab_size,
                           int64_t ignore_index, const char* op) {
  LossCudaParams p{};
  set_loss_arguments(p, logits, labels, vocab_size, ignore_index, op);
  p.rows = logits.size(0);
  check(p.rows <= std::numeric_limits<int32_t>::max(), op,
        ": logits may have at most 2^31 - 1 rows, got ", p.rows);
  check(logits.size(1) <= int64_t{1} << 30, op,
        ": logits may have at most 2^30 columns on a GPU, got ", logits.size(1));
  return p;
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor logits, Tensor labels, int64_t vocab_size,
                                           int64_t ignore_index) {
  const char* op = "masked_cross_entropy";
  LossCudaParams p = make_params(logits, labels, vocab_size, ignore_index, op);
  const Call call(logits, op);
  Tensor loss_sum = allocate(logits, {}, ScalarType::Float);
  Tensor correct = allocate(labels, {});
  Tensor lse = allocate(logits, {p.rows}, ScalarType::Float);
  Tensor row_losses = allocate(logits, {p.rows, 2}, ScalarType::Float);
  p.loss_sum = loss_sum.mutable_data_ptr<float>();
  p.correct = correct.mutable_data_ptr<int64_t>();
  p.lse = lse.mutable_data_ptr<float>();
  p.row_losses = static_cast<RowLoss*>(row_losses.mutable_data_ptr());
  masked_cross_entropy(p, call.stream);
  return {loss_sum, correct, lse};
}

// Writes the gradient to `dlogits`, which may be `logits`.
void backward_into(const Tensor& dloss, const Tensor& logits, const Tensor& labels,
                   const Tensor& lse, int64_t vocab_size, int64_t ignore_index, void* dlogits,
                   const char* op) {
  LossCudaParams p = make_params(logits, labels, vocab_size, ignore_index, op);
  set_saved(p, dloss, logits, lse, op);
  p.dloss = dloss.const_data_ptr<float>();
  p.dlogits = dlogits;
  const Call call(logits, op);
  masked_cross_entropy_backward(p, call.stream);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("masked_cross_entropy", TORCH_BOX(&forward));
  m.impl("masked_cross_entropy_backward",
         TORCH_BOX(&bert_unpad::masked_cross_entropy_backward<backward_into>));
  m.impl("masked_cross_entropy_backward_",
         TORCH_BOX(&bert_unpad::masked_cross_entropy_backward_<backward_into>));
}

}  // namespace bert_unpad::cuda
