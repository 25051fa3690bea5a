// Launches of attention's kernels: what attention.cu calls, and the grid that all of them start on.
// launch_head_dim.h and launch_bias.h define those for 16-bit types, launch_wgmma.h and
// attention_bias_d64_sm90a.cu those with wgmma, attention_fp32.cu those for fp32, position_bias.cu
// what goes on before and after where there is a position bias.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/backward_fused.h"
#include "cuda/launch.h"

namespace bert_unpad::cuda {

inline constexpr const char* kForwardOp = "varlen_attention";
inline constexpr const char* kBackwardOp = "varlen_attention_backward";

// The sequences order[first] .. order[first + sequences - 1], none longer than the args' max_q and
// max_k.
struct AttentionRun {
  AttentionCudaParams args;
  AttentionCudaBias bias;
  int first, sequences;
  int first_column = 0;  // with a position bias: see AttentionBiasLaunch
};

// bf16 or fp16, without a position bias. `kept_bytes`: see
// kept_block_bytes.
template <int kHeadDim>
void launch_forward(const AttentionRun& run, uint32_t kept_bytes, cudaStream_t stream);

// The fused kernel of this shape; without warps, two kernels.
template <int kHeadDim>
void launch_backward(const AttentionRun& run, FusedShape fused, uint32_t kept_bytes,
                     cudaStream_t stream);

// The same with wgmma, which needs compute capability 9.0, for head dims 64 and 128. `fused`: one
// kernel, of head dim 64 alone, which takes neither windows nor grouped heads; otherwise two.
template <int kHeadDim>
void launch_wgmma_forward(const AttentionRun& run, cudaStream_t stream);
template <int kHeadDim>
void launch_wgmma_backward(const AttentionRun& run, bool fused, cudaStream_t stream);

// With a position bias.
template <int kHeadDim>
void launch_bias_forward(const AttentionRun& run, uint32_t kept_bytes, cudaStream_t stream);

template <int kHeadDim>
void launch_bias_backward(const AttentionRun& run, cudaStream_t stream);

void launch_wgmma_bias_forward(const AttentionRun& run, cudaStream_t stream);
void launch_wgmma_bias_backward(const AttentionRun& run, cudaStream_t stream);

// fp32.
void launch_fp32_forward(const AttentionRun& run, cudaStream_t stream);
void launch_fp32_backward(const AttentionRun& run, cudaStream_t stream);

// Before the kernels of an operator: checks the buckets, writes `distances`.
void prepare_bias(const char* op, const AttentionCudaParams& args, const AttentionCudaBias& bias,
                  cudaStream_t stream);

// After those of the backward pass: from sums to the gradients of table, query and key.
void finish_bias(const AttentionCudaParams& args, const AttentionCudaBias& bias,
                 cudaStream_t stream);

// Starts a kernel on a grid of one block per tile, head (of `heads`) and sequence.
// `tile_rows`: queries or keys (`longest` of them at most in a sequence) that a block takes; 0 = a
// block takes all.
template <class Launch>
void launch_grid(const char* op, void (*kernel)(const Launch), int threads, uint32_t shared_bytes,
                 const AttentionRun& run, int heads, int longest, int tile_rows,
                 cudaStream_t stream) {
  const int tiles = tile_rows == 0 ? 1 : longest / tile_rows + (longest % tile_rows != 0);
  const int64_t blocks = static_cast<int64_t>(run.sequences) * heads * tiles;
  if (blocks == 0) return;
  if (blocks > INT32_MAX)
    throw std::runtime_error(std::string(op) + ": too many sequences and heads for one launch");
  Launch params{};
  static_cast<AttentionLaunch&>(params) = {run.args,
                                           run.first,
                                           tiles,
                                           run.args.heads / run.args.kv_heads,
                                           run.args.scale * kLog2e,
                                           keep_scale(run.args.keep_threshold)};
  if constexpr (kHasBias<Launch>) {
    params.bias = run.bias;
    params.first_column = run.first_column;
  }
  launch(op, kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), shared_bytes, stream,
         params);
}

inline bool has_window(const AttentionCudaParams& args) {
  return args.window.left >= 0 || args.window.right >= 0;
}

// f.operator()<head dim>()
template <class F>
void dispatch_head_dim(int head_dim, const F& f) {
  if (head_dim == 32) return f.template operator()<32>();
  if (head_dim == 64) return f.template operator()<64>();
  if (head_dim == 96) return f.template operator()<96>();
  f.template operator()<128>();
}

// The same of the kernels with wgmma.
template <class F>
void dispatch_wgmma_head_dim(int head_dim, const F& f) {
  if (head_dim == 64) return f.template operator()<64>();
  f.template operator()<128>();
}

// f.operator()<T>() for 16-bit dtypes.
template <class F>
void dispatch_16_bit_type(const AttentionCudaParams& args, const F& f) {
  if (args.dtype == DType::kBFloat16) return f.template operator()<bf16>();
  f.template operator()<f16>();
}

// The same with dropout or without it: f.operator()<T, dropout>().
template <class F>
void dispatch_16_bit(const AttentionCudaParams& args, const F& f) {
  dispatch_16_bit_type(args, [&]<class T>() {
    if (args.keep_threshold < 65536) return f.template operator()<T, true>();
    f.template operator()<T, false>();
  });
}

}  // namespace bert_unpad::cuda
