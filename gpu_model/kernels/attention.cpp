// Variable-length attention on the model of a block: the launchers and all kernels.
#include "gpu_model/block/c_api.h"
//
#include "attention/attention.cu"
#include "attention/attention_bias_d128.cu"
#include "attention/attention_bias_d32.cu"
#include "attention/attention_bias_d64.cu"
#include "attention/attention_bias_d64_sm90a.cu"
#include "attention/attention_bias_d96.cu"
#include "attention/attention_d128.cu"
#include "attention/attention_d128_sm90a.cu"
#include "attention/attention_d32.cu"
#include "attention/attention_d64.cu"
#include "attention/attention_d64_sm90a.cu"
#include "attention/attention_d96.cu"
#include "attention/attention_fp32.cu"
#include "attention/position_bias.cu"
#include "cuda/column_sum.cu"

using bert_unpad::AttentionGroup;
using bert_unpad::cuda::AttentionCudaBias;
using bert_unpad::cuda::AttentionCudaParams;

// The layouts of both are mirrored in tests/support/model_attention.py.
struct AttentionArgs {
  AttentionCudaParams params;
  AttentionCudaBias bias;
};
BU_EXPORT int64_t attention_args_size() { return sizeof(AttentionArgs); }

BU_EXPORT int attention(int backward, const AttentionArgs* args, const AttentionGroup* groups,
                        int64_t group_count) {
  return bert_unpad::block_model::guarded([&] {
    const auto run =
        backward ? bert_unpad::cuda::attention_backward : bert_unpad::cuda::attention_forward;
    run(args->params, args->bias, {groups, static_cast<size_t>(group_count)}, nullptr);
  });
}

BU_EXPORT int attention_query_sums(const AttentionArgs* args, int64_t* out) {
  return bert_unpad::block_model::guarded(
      [&] { *out = bert_unpad::cuda::attention_query_sums(args->params, args->bias); });
}

// The choices of attention/choice.h.
BU_EXPORT int attention_plan(int64_t sequences, int64_t heads, int64_t max_q, int64_t max_k,
                             int64_t head_dim, int64_t sms, int64_t shared_bytes, int64_t* out) {
  return bert_unpad::block_model::guarded([&] {
    const int d = static_cast<int>(head_dim), q = static_cast<int>(max_q);
    const int k = static_cast<int>(max_k);
    out[0] = bert_unpad::forward_row_tiles(q, d);
    const int n = static_cast<int>(sequences), h = static_cast<int>(heads);
    const bert_unpad::AttentionDevice device{static_cast<int>(sms),
                                             static_cast<uint32_t>(shared_bytes), 0};
    out[1] = bert_unpad::backward_is_fused(n, h, q, k, d, device);
    const bert_unpad::FusedShape shape = bert_unpad::fused_shape(n, h, q, k, d, device);
    out[2] = shape.warps;
    out[3] = shape.queries;
  });
}

BU_EXPORT int attention_wgmma_plan(int64_t sequences, int64_t tokens, int64_t heads, int64_t max_q,
                                   int64_t max_k, int64_t sms, int64_t shared_bytes, int64_t* out) {
  return bert_unpad::block_model::guarded([&] {
    const int q = static_cast<int>(max_q), k = static_cast<int>(max_k);
    out[0] = bert_unpad::wgmma_backward_is_fused(
        static_cast<int>(sequences), tokens, static_cast<int>(heads), q, k,
        {static_cast<int>(sms), static_cast<uint32_t>(shared_bytes), 90});
    out[1] = bert_unpad::wgmma_backward_groups(q, k);
    out[2] = bert_unpad::wgmma_backward_bytes(q, k);
    out[3] = bert_unpad::wgmma_forward_groups(q);
  });
}
