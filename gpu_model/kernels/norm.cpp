// dropout_add_layer_norm on the model of a block.
#include "gpu_model/block/c_api.h"
//
#include "norm/norm.cu"

using bert_unpad::cuda::NormCudaParams;

BU_EXPORT int64_t norm_params_size() { return sizeof(NormCudaParams); }

BU_EXPORT int norm_forward(const NormCudaParams* p) {
  return bert_unpad::block_model::guarded(
      [&] { bert_unpad::cuda::dropout_add_layer_norm(*p, nullptr); });
}

// Rows of partials, and tickets.
BU_EXPORT int norm_scratch(const NormCudaParams* p, int64_t* sizes) {
  return bert_unpad::block_model::guarded([&] {
    const auto [rows, tickets] = bert_unpad::cuda::dropout_add_layer_norm_scratch(*p);
    sizes[0] = rows;
    sizes[1] = tickets;
  });
}

BU_EXPORT int norm_backward(const NormCudaParams* p) {
  return bert_unpad::block_model::guarded(
      [&] { bert_unpad::cuda::dropout_add_layer_norm_backward(*p, nullptr); });
}
