// dropout_add_layer_norm on the model of a block.
#include "gpu_model/block/c_api.h"
//
#include "cuda/column_sum.cu"
#include "norm/norm.cu"

using bert_unpad::cuda::NormCudaParams;

BU_EXPORT int64_t norm_params_size() { return sizeof(NormCudaParams); }

BU_EXPORT int norm_forward(const NormCudaParams* p) {
  return bert_unpad::block_model::guarded(
      [&] { bert_unpad::cuda::dropout_add_layer_norm(*p, nullptr); });
}

BU_EXPORT int norm_partial_rows(const NormCudaParams* p, int64_t* rows) {
  return bert_unpad::block_model::guarded(
      [&] { *rows = bert_unpad::cuda::dropout_add_layer_norm_partial_rows(*p); });
}

BU_EXPORT int norm_backward(const NormCudaParams* p) {
  return bert_unpad::block_model::guarded(
      [&] { bert_unpad::cuda::dropout_add_layer_norm_backward(*p, nullptr); });
}
