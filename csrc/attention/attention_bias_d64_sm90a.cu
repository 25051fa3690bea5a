// Attention with wgmma, head dim 64, with a position bias: one kernel of each kind, as in
// launch_bias.h.
#define BU_REQUIRE_TRAPS

#include "attention/backward_dq_wgmma.h"
#include "attention/backward_keys_wgmma.h"
#include "attention/forward_wgmma.h"
#include "attention/launch.h"

namespace bert_unpad::cuda {

void launch_wgmma_bias_forward(const AttentionRun& run, cudaStream_t stream) {
  dispatch_16_bit_type(run.args, [&]<class T>() {
    launch_grid(kForwardOp,
                attention_forward_wgmma_kernel<T, 64, 1, true, true, AttentionBiasLaunch>, 128,
                WgmmaKeys<T, 64, 1>::kSharedBytes, run, run.args.heads, run.args.max_q, 64, stream);
  });
}

void launch_wgmma_bias_backward(const AttentionRun& run, cudaStream_t stream) {
  dispatch_16_bit_type(run.args, [&]<class T>() {
    launch_grid(kBackwardOp, attention_backward_dq_wgmma_kernel<T, 64, true, AttentionBiasLaunch>,
                128, WgmmaQueryGradientShared<T, 64>::kBiasBytes, run, run.args.heads,
                run.args.max_q, 64, stream);
    launch_grid(kBackwardOp, attention_backward_keys_wgmma_kernel<T, 64, true, AttentionBiasLaunch>,
                128, WgmmaKeyGradientShared<64>::kBytes + 4 * GradientTile<64>::kBytes, run,
                run.args.kv_heads, run.args.max_k, 64, stream);
  });
}

}  // namespace bert_unpad::cuda
