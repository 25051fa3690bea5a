// Which kernel takes a launch of attention: pure functions of sizes and device, so that they can be
// tested, and a captured graph stays right.
#pragma once

#include <cstdint>

#include "attention/backward_kernel.h"

namespace bert_unpad {

struct AttentionDevice {
  int sms;
  uint32_t shared_bytes;  // that a block may ask for
};

// Row tiles of 16 queries that a warp of the forward kernel takes: two where a block of 4 warps
// then still has a row for every warp, and registers suffice.
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

// Is the backward pass one kernel with a block for each head of a sequence? It does 5 products
// where two kernels do 7, but needs a whole head's dQ in shared memory, and as many heads as fill
// the device. 128 columns leave no registers for it.
inline bool backward_is_fused(int sequences, int heads, int max_q, int max_k, int head_dim,
                              const AttentionDevice& device) {
  return head_dim <= 64 && static_cast<int64_t>(sequences) * heads >= device.sms &&
         max_q <= kFusedMaxQueries &&
         fused_shared_bytes(max_q, max_k, head_dim) <= device.shared_bytes;
}

}  // namespace bert_unpad
