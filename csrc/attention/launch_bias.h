// The launches of one head dim for bf16 and fp16, with a position bias. One kernel of each kind
// serves all calls, with and without windows, grouped heads and dropout.
#pragma once

#include "attention/backward_dq_kernel.h"
#include "attention/backward_kernel.h"
#include "attention/forward_kernel.h"
#include "attention/launch.h"

namespace bert_unpad::cuda {

template <int kHeadDim>
void launch_bias_forward(const AttentionRun& run, uint32_t kept_bytes, cudaStream_t stream) {
  dispatch_16_bit_type(run.args, [&]<class T>() {
    launch_grid(kForwardOp,
                attention_forward_kernel<T, kHeadDim, 1, true, true, AttentionBiasLaunch>,
                32 * kForwardWarps, ForwardKeys<T, kHeadDim, true, true>::kSharedBytes + kept_bytes,
                run, run.args.heads, run.args.max_q, 16 * kForwardWarps, stream);
  });
}

template <int kHeadDim>
void launch_bias_backward(const AttentionRun& run, cudaStream_t stream) {
  constexpr int kWarps = 4;
  constexpr int kQueries = kBackwardQueries<kHeadDim>;
  const uint32_t keys =
      KeyBiasShared<kWarps, kQueries>::bytes(BackwardShared<kHeadDim, kWarps, false>::bytes(0));
  dispatch_16_bit_type(run.args, [&]<class T>() {
    launch_grid(kBackwardOp,
                attention_backward_dq_kernel<T, kHeadDim, true, true, AttentionBiasLaunch>,
                32 * kQueryGradientWarps, QueryGradientBias<T, kHeadDim>::kBytes, run,
                run.args.heads, run.args.max_q, 16 * kQueryGradientWarps, stream);
    constexpr int kColumns = kKeyColumns<kHeadDim, true>;
    for (AttentionRun part = run; part.first_column < kHeadDim; part.first_column += kColumns)
      launch_grid(kBackwardOp,
                  attention_backward_kernel<T, kHeadDim, kWarps, true, false, true, kQueries,
                                            AttentionBiasLaunch>,
                  32 * kWarps, keys, part, run.args.kv_heads, run.args.max_k, 16 * kWarps, stream);
  });
}

}  // namespace bert_unpad::cuda
