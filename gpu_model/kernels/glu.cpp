// glu on the model of a block.
#include "gpu_model/block/c_api.h"
//
#include "gelu/glu.cu"

using bert_unpad::cuda::GluCudaParams;

BU_EXPORT int64_t glu_params_size() { return sizeof(GluCudaParams); }

BU_EXPORT int glu_forward(const GluCudaParams* p) {
  return bert_unpad::block_model::guarded([&] { bert_unpad::cuda::glu(*p, nullptr); });
}

// Rows of partials, and tickets.
BU_EXPORT int glu_scratch(const GluCudaParams* p, int64_t* sizes) {
  return bert_unpad::block_model::guarded([&] {
    const auto [rows, tickets] = bert_unpad::cuda::glu_scratch(*p);
    sizes[0] = rows;
    sizes[1] = tickets;
  });
}

BU_EXPORT int glu_backward(const GluCudaParams* p) {
  return bert_unpad::block_model::guarded([&] { bert_unpad::cuda::glu_backward(*p, nullptr); });
}
