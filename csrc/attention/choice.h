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
// other. With 128 columns they take no position bias.
inline bool has_wgmma(DType dtype, int head_dim, bool bias, const AttentionDevice& device) {
  const bool columns = head_dim == 64 || (head_dim == 128 && !bias);
  return device.capability == 90 && dtype != DType::kFloat32 && columns;
}

// Shared memory of a forward or fused backward kernel's block for what it works on; only
// Blackwell's kernels keep it there, see KeptBlock.
constexpr uint32_t kept_block_bytes(const AttentionDevice& device) {
  return device.capability >= 100 ? KeptBlock<>::kBytes : 0;
}

// Row tiles of 16 queries per warp of the forward kernel: two where registers suffice and a block
// of 4 warps still has rows for every warp.
constexpr int forward_row_tiles(int max_q, int head_dim) {
  return head_dim == 64 && max_q > 64 ? 2 : 1;
}

// Most queries of one sequence that the fused backward kernel takes: a block computes a whole head,
// so a long sequence among short ones would keep one multiprocessor busy long after all others.
inline constexpr int kFusedMaxQueries = 1024;

// Shared memory that the system takes of each block.
inline constexpr uint32_t kReservedShared = 1024;

// The shape of the fused backward kernel; without warps: it does not fit. Two blocks of 4 warps on
// a multiprocessor wait for each other's memory and barriers less than one of 8, which takes about
// 9/8 of their time for two heads. But 8 are better where two blocks do not fit, or where the last
// heads would leave half of the multiprocessors' room empty. Smaller tiles of queries are for
// devices where two blocks, or even one, of 4 warps only fit with them.
inline FusedShape fused_shape(int sequences, int heads, int max_q, int max_k, int head_dim,
                              const AttentionDevice& device) {
  if (max_q > kFusedMaxQueries || head_dim > 64) return {};
  const uint32_t room = device.shared_bytes, kept = kept_block_bytes(device);
  if (head_dim == 32) {
    const bool fits = BackwardShared<32, 4, true>::bytes(max_q) + kept <= room;
    return fits ? FusedShape{4, 64} : FusedShape{};
  }
  const uint32_t four = BackwardShared<64, 4, true>::bytes(max_q) + kept;
  const uint32_t small = BackwardShared<64, 4, true, 32>::bytes(max_q) + kept;
  const auto pairs = [&](uint32_t bytes) {
    return 2 * (bytes + kReservedShared) <= room + kReservedShared;
  };
  if (max_k > 4 * 32 && BackwardShared<64, 8, true>::bytes(max_q) + kept <= room) {
    const int64_t blocks = static_cast<int64_t>(sequences) * heads, sms = device.sms;
    const int64_t rounds = (blocks + sms - 1) / sms, of_pairs = (blocks + 2 * sms - 1) / (2 * sms);
    if (!pairs(four) || 9 * rounds < 8 * 2 * of_pairs) return {8, 64};
  }
  if (pairs(four) || (four <= room && !pairs(small))) return {4, 64};
  return small <= room ? FusedShape{4, 32} : FusedShape{};
}

// Whether the backward pass is one fused kernel with one block per head and sequence, or two
// kernels. The fused kernel computes 5 matrix products instead of 7, but it needs enough heads to
// fill the device, and does not have enough registers for more than 64 columns.
inline bool backward_is_fused(int sequences, int heads, int max_q, int max_k, int head_dim,
                              const AttentionDevice& device) {
  return static_cast<int64_t>(sequences) * heads >= device.sms &&
         fused_shape(sequences, heads, max_q, max_k, head_dim, device).warps > 0;
}

// Floats of the fused backward kernel's workspace: its sums of dQ, where the keys may take several
// passes.
inline int64_t query_sum_floats(int64_t q_tokens, int sequences, int heads, int max_k,
                                int head_dim) {
  return max_k > 4 * 32 ? heads * query_sum_rows(q_tokens, sequences) * head_dim : 0;
}

// Warpgroups of a block of the forward kernel with wgmma, 64 queries each. Two share what one of
// them would copy. By the model of an SM, blocks of one take 0.83 to 0.98 of their time for up to
// 192 tokens, where fewer of their rows are empty, and 0.95 to 1.02 beyond.
constexpr int wgmma_forward_groups(int max_q) { return max_q > 192 ? 2 : 1; }

// Warpgroups of a block of the fused backward kernel with wgmma, 64 keys of a pass each. Up to 192
// queries there is shared memory for two blocks of one, which by the model of an SM take 0.69 to
// 0.90 of the time of one block of two.
constexpr int wgmma_backward_groups(int max_q, int max_k) {
  return max_q > 192 && max_k > 64 ? 2 : 1;
}

inline uint32_t wgmma_backward_bytes(int max_q, int max_k) {
  return wgmma_backward_groups(max_q, max_k) == 2 ? WgmmaBackwardShared<2>::bytes(max_q, max_k)
                                                  : WgmmaBackwardShared<1>::bytes(max_q, max_k);
}

// Whether the backward pass with wgmma is one fused kernel, of which a multiprocessor holds one
// block, or two up to 192 queries. By the model of an SM two kernels take 3/2 of its time where
// either fills the device, but their blocks are smaller. Where all sequences are as long as the
// longest, the last round of whole heads takes as long as a full one; up to 256 keys two kernels
// gain nothing from that.
inline bool wgmma_backward_is_fused(int sequences, int64_t q_tokens, int heads, int max_q,
                                    int max_k, const AttentionDevice& device) {
  if (max_q > kFusedMaxQueries || wgmma_backward_bytes(max_q, max_k) > device.shared_bytes)
    return false;
  const int64_t sms = device.sms, blocks = static_cast<int64_t>(sequences) * heads;
  const bool alike = q_tokens == static_cast<int64_t>(sequences) * max_q;
  const int64_t rounds = alike && max_k > 256 ? (blocks + sms - 1) / sms : 1;
  return 3 * q_tokens * heads >= 2 * rounds * sms * max_q;
}

// Whether the fused kernel with mma.sync takes less time than that with wgmma. By the model of an
// SM it takes 0.92 to 0.98 of it from 65 to 96 tokens and up to 1.08 at 112 and 128; measured it
// was only against blocks of two warpgroups (0.92 to 0.97 at 128 tokens on an H100 and an H200). Up
// to 64 tokens wgmma takes less.
constexpr bool mma_backward_is_faster(int max_q, int max_k) {
  return max_q <= 128 && 64 < max_k && max_k <= 128;
}

}  // namespace bert_unpad
