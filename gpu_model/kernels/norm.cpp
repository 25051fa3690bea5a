// dropout_add_layer_norm on the model of a block.
#include "gpu_model/block/c_api.h"
//
#include "cuda/column_sum.cu"
#include "cuda/fp8_scaled.cu"
#include "norm/norm.cu"

using bert_unpad::cuda::NormCudaParams, bert_unpad::cuda::NormFp8Params;

BU_EXPORT int64_t norm_params_size() { return sizeof(NormCudaParams); }

BU_EXPORT int norm_forward(const NormCudaParams* p) {
  return bert_unpad::block_model::guarded(
      [&] { bert_unpad::cuda::dropout_add_layer_norm(*p, nullptr); });
}

// The same, and y in 8 bits.
BU_EXPORT int norm_fp8_forward(const NormCudaParams* norm, const float* scale, void* q,
                               void* q_transposed, float* largest) {
  NormFp8Params p{*norm, {}, scale, largest};
  p.fp8.rows = norm->norm.rows;
  p.fp8.columns = norm->norm.hidden;
  p.fp8.q = static_cast<uint8_t*>(q);
  p.fp8.q_transposed = static_cast<uint8_t*>(q_transposed);
  return bert_unpad::block_model::guarded(
      [&] { bert_unpad::cuda::dropout_add_layer_norm_fp8(p, nullptr); });
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
