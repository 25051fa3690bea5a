// CPU bindings of the cross-entropy of masked tokens: checks, rows over threads, sums.
#include "common/allocate.h"
#include "loss/loss.h"

#include <tuple>
#include <vector>

#include "cpu/parallel.h"
#include "loss/arguments.h"

namespace bert_unpad {

namespace {

LossCpuParams make_params(const Tensor& logits, const Tensor& labels, int64_t vocab_size,
                          int64_t ignore_index, const char* op) {
  LossCpuParams p{};
  set_loss_arguments(p, logits, labels, vocab_size, ignore_index, op);
  for (int64_t i = 0; i < logits.size(0); ++i)
    check(p.labels[i] == ignore_index || (p.labels[i] >= 0 && p.labels[i] < vocab_size), op,
          ": labels[", i, "] = ", p.labels[i], " is neither ignore_index = ", ignore_index,
          " nor in [0, vocab_size = ", vocab_size, ")");
  return p;
}

std::tuple<Tensor, Tensor, Tensor> masked_cross_entropy(Tensor logits, Tensor labels,
                                                        int64_t vocab_size, int64_t ignore_index) {
  const char* op = "masked_cross_entropy";
  LossCpuParams p = make_params(logits, labels, vocab_size, ignore_index, op);
  const int64_t rows = logits.size(0);
  Tensor lse = allocate(logits, {rows}, ScalarType::Float);
  p.lse = lse.mutable_data_ptr<float>();
  struct Row {
    float loss;
    bool correct;
  };
  std::vector<Row> results(rows);
  const LossKernels& kernels = loss_kernels();
  parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (p.labels[i] == ignore_index) {
        p.lse[i] = 0.0f;
        results[i] = {0.0f, false};
      } else {
        results[i].loss = kernels.forward(p, i, results[i].correct);
      }
    }
  });
  double loss = 0.0;
  int64_t correct = 0;
  for (const Row& row : results) {
    loss += row.loss;
    correct += row.correct;
  }
  Tensor loss_sum = allocate(logits, {}, ScalarType::Float);
  Tensor correct_sum = allocate(labels, {});
  *loss_sum.mutable_data_ptr<float>() = static_cast<float>(loss);
  *correct_sum.mutable_data_ptr<int64_t>() = correct;
  return {loss_sum, correct_sum, lse};
}

// Writes the gradient to `dlogits`, which may be `logits`.
void backward_into(const Tensor& dloss, const Tensor& logits, const Tensor& labels,
                   const Tensor& lse, int64_t vocab_size, int64_t ignore_index, void* dlogits,
                   const char* op) {
  LossCpuParams p = make_params(logits, labels, vocab_size, ignore_index, op);
  set_saved(p, dloss, logits, lse, op);
  p.dloss = *dloss.const_data_ptr<float>();
  p.dlogits = dlogits;
  const LossKernels& kernels = loss_kernels();
  parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernels.backward(p, i);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("masked_cross_entropy", TORCH_BOX(&masked_cross_entropy));
  m.impl("masked_cross_entropy_backward", TORCH_BOX(&masked_cross_entropy_backward<backward_into>));
  m.impl("masked_cross_entropy_backward_",
         TORCH_BOX(&masked_cross_entropy_backward_<backward_into>));
}

}  // namespace bert_unpad
