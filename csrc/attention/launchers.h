// One launch of each attention kernel family. The definitions are in forward_launch.h and
// backward_launch.h, instantiated by a .cu file for each head dim, so that they compile side by
// side.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/kernel_parts.h"

namespace bert_unpad::cuda {

inline constexpr const char* kForwardOp = "varlen_attention";
inline constexpr const char* kBackwardOp = "varlen_attention_backward";

// The sequences order[first] .. order[first + sequences - 1], none longer than the args' max_q and
// max_k.
struct AttentionRun {
  AttentionArgs args;
  int first, sequences;
};

// bf16 or fp16.
template <int kHeadDim>
void launch_forward(const AttentionRun& run, cudaStream_t stream);

template <int kHeadDim>
void launch_backward(const AttentionRun& run, bool fused, cudaStream_t stream);

// fp32.
void launch_fp32_forward(const AttentionRun& run, cudaStream_t stream);
void launch_fp32_backward(const AttentionRun& run, cudaStream_t stream);

}  // namespace bert_unpad::cuda
