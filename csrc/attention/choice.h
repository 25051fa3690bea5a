// Chooses the attention kernel for a launch. The choice is a pure function of sizes and device: it
// can be tested without a GPU, and a captured graph would choose the same again.
#pragma once

#include <cstdint>

#include "attention/backward_kernel.h"
#include "attention/backward_wgmma.h"

namespace bert_unpad {

struct AttentionDevice {
  int sms;
  uint32_t shared_bytes;  // that a block may ask for
  int capability;         // compute capability, times 10
};

// Whether there are kernels with wgmma. Their machine code runs on compute capability 9.0 and on no
// other.
inline bool has_wgmma(DType dtype, int head_dim, bool bias, const AttentionDevice& device) {
  return device.capability == 90 && dtype != DType::kFloat32 && head_dim == 64 && !bias;
}

// Row tiles of 16 queries per warp of the forward kernel: two where registers suffice and a block
// of 4 warps still has rows for every warp.
constexpr int forward_row_tiles(int max_q, int head_dim) {
  return head_dim == 64 && max_q > 64 ? 2 : 1;
}

// Warps of the fused backward kernel, 16 keys each.
constexpr int fused_warps(int max_k, int head_dim) { return head_dim == 64 && max_k > 64 ? 8 : 4; }

inline uint32_t fused_shared_bytes(int max_q, int max_k, int head_dim) {
  const auto bytes = [&]<int kHeadDim>() {
    return fused_warps(max_k, head_dim) == 8
               ? BackwardShared<kHeadDim, 8, true>::bytes(max_q, max_k)
               : BackwardShared<kHeadDim, 4, true>::bytes(max_q, max_k);
  };
  return head_dim == 64 ? bytes.template operator()<64>() : bytes.template operator()<32>();
}

// Most queries of one sequence that the fused backward kernel takes. fused_shared_bytes computes in
// 32 bits: 256 bytes of sums per query overflow from 2^23 queries on, and a wrapped number would
// look as if it fitted. Sums fill a block's shared memory long before that. So the bound only
// matters for few keys, which need no sums because there is a single pass: 227 KB would then hold
// 20,000 queries in one block, which is too much work for it.
inline constexpr int kFusedMaxQueries = 4096;

// Whether the backward pass is one fused kernel with one block per head and sequence, or two
// kernels. The fused kernel computes 5 matrix products instead of 7, but it keeps a whole head's dQ
// in shared memory, needs enough heads to fill the device, and does not have enough registers for
// 128 columns.
inline bool backward_is_fused(int sequences, int heads, int max_q, int max_k, int head_dim,
                              const AttentionDevice& device) {
  return head_dim <= 64 && static_cast<int64_t>(sequences) * heads >= device.sms &&
         max_q <= kFusedMaxQueries &&
         fused_shared_bytes(max_q, max_k, head_dim) <= device.shared_bytes;
}

// Warpgroups of the backward kernel with wgmma, 64 keys each.
constexpr int wgmma_backward_groups(int max_k) { return max_k > 64 ? 2 : 1; }

inline uint32_t wgmma_backward_bytes(int max_q, int max_k) {
  return wgmma_backward_groups(max_k) == 2 ? WgmmaBackwardShared<2>::bytes(max_q, max_k)
                                           : WgmmaBackwardShared<1>::bytes(max_q, max_k);
}

// The same of the backward kernel with wgmma, where there is one.
inline bool wgmma_backward_is_fused(int sequences, int heads, int max_q, int max_k,
                                    const AttentionDevice& device) {
  return static_cast<int64_t>(sequences) * heads >= device.sms && max_q <= kFusedMaxQueries &&
         wgmma_backward_bytes(max_q, max_k) <= device.shared_bytes;
}

}  // namespace bert_unpad
