// glu on the model of a block.
#include "gpu_model/block/c_api.h"
//
#include "cuda/column_sum.cu"
#include "gelu/glu.cu"

using bert_unpad::cuda::GluCudaParams;

BU_EXPORT int64_t glu_params_size() { return sizeof(GluCudaParams); }

BU_EXPORT int glu_forward(const GluCudaParams* p) {
  return bert_unpad::block_model::guarded([&] { bert_unpad::cuda::glu(*p, nullptr); });
}

BU_EXPORT int glu_partial_rows(const GluCudaParams* p, int64_t* rows) {
  return bert_unpad::block_model::guarded([&] { *rows = bert_unpad::cuda::glu_partial_rows(*p); });
}

BU_EXPORT int glu_backward(const GluCudaParams* p) {
  return bert_unpad::block_model::guarded([&] { bert_unpad::cuda::glu_backward(*p, nullptr); });
}
