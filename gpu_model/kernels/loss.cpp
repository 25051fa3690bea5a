// masked_cross_entropy on the model of a block.
#include "gpu_model/block/c_api.h"
//
#include "loss/loss.cu"

using bert_unpad::DType;
using bert_unpad::cuda::LossCudaParams;
using bert_unpad::cuda::RowLoss;

namespace {

LossCudaParams params(int64_t dtype, int64_t rows, int64_t columns, int64_t vocab,
                      int64_t ignore_index, const void* logits, const int64_t* labels, float* lse) {
  LossCudaParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.rows = rows;
  p.columns = columns;
  p.vocab = vocab;
  p.ignore_index = ignore_index;
  p.logits = logits;
  p.labels = labels;
  p.lse = lse;
  return p;
}

}  // namespace

BU_EXPORT int loss_forward(int64_t dtype, int64_t rows, int64_t columns, int64_t vocab,
                           int64_t ignore_index, const void* logits, const int64_t* labels,
                           float* lse, void* row_losses, float* loss_sum, int64_t* correct) {
  return bert_unpad::block_model::guarded([&] {
    LossCudaParams p = params(dtype, rows, columns, vocab, ignore_index, logits, labels, lse);
    p.row_losses = static_cast<RowLoss*>(row_losses);
    p.loss_sum = loss_sum;
    p.correct = correct;
    bert_unpad::cuda::masked_cross_entropy(p, nullptr);
  });
}

BU_EXPORT int loss_backward(int64_t dtype, int64_t rows, int64_t columns, int64_t vocab,
                            int64_t ignore_index, const void* logits, const int64_t* labels,
                            float* lse, const float* dloss, void* dlogits) {
  return bert_unpad::block_model::guarded([&] {
    LossCudaParams p = params(dtype, rows, columns, vocab, ignore_index, logits, labels, lse);
    p.dloss = dloss;
    p.dlogits = dlogits;
    bert_unpad::cuda::masked_cross_entropy_backward(p, nullptr);
  });
}
