// The launches of one head dim for bf16 and fp16, without a position bias: which tile shape takes a
// run, and its grid.
#pragma once

#include "attention/backward_dq_kernel.h"
#include "attention/backward_kernel.h"
#include "attention/choice.h"
#include "attention/forward_kernel.h"
#include "attention/launch.h"

namespace bert_unpad::cuda {

template <int kHeadDim>
void launch_forward(const AttentionRun& run, uint32_t kept_bytes, cudaStream_t stream) {
  const auto start = [&]<class T, int kRowTiles, bool kDropout, bool kWindow>() {
    launch_grid(
        kForwardOp,
        attention_forward_kernel<T, kHeadDim, kRowTiles, kDropout, kWindow, AttentionLaunch>,
        32 * kForwardWarps, ForwardKeys<T, kHeadDim, kWindow>::kSharedBytes + kept_bytes, run,
        run.args.heads, run.args.max_q, 16 * kForwardWarps * kRowTiles, stream);
  };
  dispatch_16_bit(run.args, [&]<class T, bool kDropout>() {
    if (has_window(run.args)) return start.template operator()<T, 1, kDropout, true>();
    if constexpr (kHeadDim == 64) {
      if (forward_row_tiles(run.args.max_q, kHeadDim) == 2)
        return start.template operator()<T, 2, kDropout, false>();
    }
    start.template operator()<T, 1, kDropout, false>();
  });
}

template <int kHeadDim>
void launch_backward(const AttentionRun& run, FusedShape fused, uint32_t kept_bytes,
                     cudaStream_t stream) {
  const int heads = run.args.heads, kv_heads = run.args.kv_heads;
  const int max_q = run.args.max_q, max_k = run.args.max_k;
  const auto start_fused = [&]<class T, int kWarps, int kQueries, bool kDropout>() {
    launch_grid(kBackwardOp,
                attention_backward_kernel<T, kHeadDim, kWarps, kDropout, true, false, kQueries,
                                          AttentionLaunch>,
                32 * kWarps,
                BackwardShared<kHeadDim, kWarps, true, kQueries>::bytes(max_q) + kept_bytes, run,
                heads, 0, 0, stream);
  };
  const auto start_split = [&]<class T, bool kDropout, bool kWindow, bool kGeneral>() {
    launch_grid(kBackwardOp,
                attention_backward_dq_kernel<T, kHeadDim, kDropout, kWindow, AttentionLaunch>,
                32 * kQueryGradientWarps, QueryGradientKeys<T, kHeadDim>::kSharedBytes, run, heads,
                max_q, 16 * kQueryGradientWarps, stream);
    constexpr int kWarps = 4;
    launch_grid(kBackwardOp,
                attention_backward_kernel<T, kHeadDim, kWarps, kDropout, false, kGeneral,
                                          kBackwardQueries<kHeadDim>, AttentionLaunch>,
                32 * kWarps, BackwardShared<kHeadDim, kWarps, false>::bytes(0), run, kv_heads,
                max_k, 16 * kWarps, stream);
  };
  dispatch_16_bit(run.args, [&]<class T, bool kDropout>() {
    if constexpr (kHeadDim <= 64) {
      if constexpr (kHeadDim == 64) {
        if (fused.warps == 8) return start_fused.template operator()<T, 8, 64, kDropout>();
        if (fused.queries == 32) return start_fused.template operator()<T, 4, 32, kDropout>();
      }
      if (fused.warps == 4) return start_fused.template operator()<T, 4, 64, kDropout>();
    }
    if (has_window(run.args)) return start_split.template operator()<T, kDropout, true, true>();
    if (heads != kv_heads) return start_split.template operator()<T, kDropout, false, true>();
    start_split.template operator()<T, kDropout, false, false>();
  });
}

}  // namespace bert_unpad::cuda
