// The launches of one head dim with wgmma for bf16 and fp16, without a position bias: which kernel
// and tile shape takes a run, and its grid.
#pragma once

#include "attention/backward_dq_wgmma.h"
#include "attention/backward_keys_wgmma.h"
#include "attention/backward_wgmma.h"
#include "attention/choice.h"
#include "attention/forward_wgmma.h"
#include "attention/launch.h"

namespace bert_unpad::cuda {

template <int kHeadDim>
void launch_wgmma_forward(const AttentionRun& run, cudaStream_t stream) {
  const auto start = [&]<class T, int kGroups, bool kDropout, bool kWindow>() {
    launch_grid(
        kForwardOp,
        attention_forward_wgmma_kernel<T, kHeadDim, kGroups, kDropout, kWindow, AttentionLaunch>,
        128 * kGroups, WgmmaKeys<T, kHeadDim, kGroups>::kSharedBytes, run, run.args.heads,
        run.args.max_q, 64 * kGroups, stream);
  };
  dispatch_16_bit(run.args, [&]<class T, bool kDropout>() {
    if (has_window(run.args)) return start.template operator()<T, 1, kDropout, true>();
    if (wgmma_forward_groups(run.args.max_q) == 2)
      return start.template operator()<T, 2, kDropout, false>();
    start.template operator()<T, 1, kDropout, false>();
  });
}

template <int kHeadDim>
void launch_wgmma_backward(const AttentionRun& run, bool fused, cudaStream_t stream) {
  const int max_q = run.args.max_q, max_k = run.args.max_k;
  const auto start_fused = [&]<class T, int kGroups, bool kDropout>() {
    launch_grid(kBackwardOp, attention_backward_wgmma_kernel<T, kGroups, kDropout>, 128 * kGroups,
                WgmmaBackwardShared<kGroups>::bytes(max_q, max_k), run, run.args.heads, 0, 0,
                stream);
  };
  const auto start_split = [&]<class T, bool kDropout>() {
    launch_grid(
        kBackwardOp, attention_backward_dq_wgmma_kernel<T, kHeadDim, kDropout, AttentionLaunch>,
        128, WgmmaQueryGradientShared<T, kHeadDim>::kBytes, run, run.args.heads, max_q, 64, stream);
    launch_grid(
        kBackwardOp, attention_backward_keys_wgmma_kernel<T, kHeadDim, kDropout, AttentionLaunch>,
        128, WgmmaKeyGradientShared<kHeadDim>::kBytes, run, run.args.kv_heads, max_k, 64, stream);
  };
  dispatch_16_bit(run.args, [&]<class T, bool kDropout>() {
    if constexpr (kHeadDim == 64) {
      if (fused && wgmma_backward_groups(max_q, max_k) == 2)
        return start_fused.template operator()<T, 2, kDropout>();
      if (fused) return start_fused.template operator()<T, 1, kDropout>();
    }
    start_split.template operator()<T, kDropout>();
  });
}

}  // namespace bert_unpad::cuda
