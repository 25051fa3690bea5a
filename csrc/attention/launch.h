// Launches of attention's kernels: what attention.cu calls, and the grid that all of them start on.
// launch_head_dim.h defines those for 16-bit types, attention_fp32.cu those for fp32.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/kernel_parts.h"
#include "cuda/launch.h"

namespace bert_unpad::cuda {

inline constexpr const char* kForwardOp = "varlen_attention";
inline constexpr const char* kBackwardOp = "varlen_attention_backward";

// The sequences order[first] .. order[first + sequences - 1], none longer than the args' max_q and
// max_k.
struct AttentionRun {
  AttentionCudaParams args;
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

// Starts a kernel on a grid of one block per tile, head (of `heads`) and sequence.
// `tile_rows`: queries or keys (`longest` of them at most in a sequence) that a block takes; 0 = a
// block takes all.
inline void launch_grid(const char* op, void (*kernel)(const AttentionLaunch), int threads,
                        uint32_t shared_bytes, const AttentionRun& run, int heads, int longest,
                        int tile_rows, cudaStream_t stream) {
  const int tiles = tile_rows == 0 ? 1 : longest / tile_rows + (longest % tile_rows != 0);
  const int64_t blocks = static_cast<int64_t>(run.sequences) * heads * tiles;
  if (blocks == 0) return;
  if (blocks > INT32_MAX)
    throw std::runtime_error(std::string(op) + ": too many sequences and heads for one launch");
  launch(op, kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), shared_bytes, stream,
         AttentionLaunch{run.args, run.first, tiles, run.args.heads / run.args.kv_heads});
}

inline bool has_window(const AttentionCudaParams& args) {
  return args.window.left >= 0 || args.window.right >= 0;
}

// f.operator()<T, dropout>() for 16-bit dtypes.
template <class F>
void dispatch_16_bit(const AttentionCudaParams& args, const F& f) {
  const bool dropout = args.keep_threshold < 65536;
  if (args.dtype == DType::kBFloat16)
    dropout ? f.template operator()<bf16, true>() : f.template operator()<bf16, false>();
  else
    dropout ? f.template operator()<f16, true>() : f.template operator()<f16, false>();
}

}  // namespace bert_unpad::cuda
