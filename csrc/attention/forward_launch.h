// launch_forward; see launchers.h.
#pragma once

#include "attention/forward_kernel.h"
#include "attention/launch_grid.h"
#include "attention/plan.h"

namespace bert_unpad::cuda {

template <int kHeadDim>
void launch_forward(const AttentionRun& run, cudaStream_t stream) {
  const auto start = [&]<class T, int kRowTiles, bool kDropout>() {
    launch_grid(kForwardOp, attention_forward_kernel<T, kHeadDim, kRowTiles, kDropout>,
                32 * kForwardWarps, ForwardKeys<T, kHeadDim>::kSharedBytes, run, run.args.max_q,
                16 * kForwardWarps * kRowTiles, stream);
  };
  dispatch_16_bit(run.args, [&]<class T, bool kDropout>() {
    if constexpr (kHeadDim == 64) {
      if (forward_row_tiles(run.args.max_q, kHeadDim) == 2)
        return start.template operator()<T, 2, kDropout>();
    }
    start.template operator()<T, 1, kDropout>();
  });
}

}  // namespace bert_unpad::cuda
