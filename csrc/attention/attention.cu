// Variable-length attention: from a call to launches. Kernels are chosen once for the whole call;
// groups only choose grids and tile shapes. So groups change no bit of a result.
#include <cstdlib>
#include <string_view>

#include "attention/choice.h"
#include "attention/launch.h"
#include "cuda/capability.h"
#include "cuda/fork.h"

namespace bert_unpad::cuda {
namespace {

// f(run, stream) for each group, side by side; for all sequences at once without groups.
template <class F>
void for_each_run(const char* op, const AttentionCudaParams& args, const AttentionCudaBias& bias,
                  std::span<const AttentionGroup> groups, cudaStream_t stream, const F& f) {
  if (groups.empty()) return f(AttentionRun{args, bias, 0, args.sequences}, stream);
  Fork fork(op, stream, static_cast<int>(groups.size()));
  AttentionRun run{args, bias, 0, 0};
  for (size_t i = 0; i < groups.size(); ++i) {
    run.first += run.sequences;
    run.sequences = groups[i].sequences;
    run.args.max_q = groups[i].max_q;
    run.args.max_k = groups[i].max_k;
    f(run, fork.branch(static_cast<int>(i)));
  }
  fork.join();
}

// The current device; throws where it does not multiply this dtype.
AttentionDevice this_device(const char* op, DType dtype) {
  const int capability = compute_capability(op);
  if (dtype == DType::kBFloat16) check_bf16_products(op, capability);
  int device = 0;
  check_cuda(cudaGetDevice(&device), op);
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), op);
    return value;
  };
  return {attribute(cudaDevAttrMultiProcessorCount),
          static_cast<uint32_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)), capability};
}

// BERT_UNPAD_WGMMA=0: a GPU with wgmma takes the kernels that others have, to compare the two.
bool wgmma_wanted(const char* op) {
  const char* value = std::getenv("BERT_UNPAD_WGMMA");
  const std::string_view wish = value == nullptr ? "1" : value;
  if (wish != "0" && wish != "1")
    throw std::runtime_error(std::string(op) + ": BERT_UNPAD_WGMMA must be 0 or 1, got " + value);
  return wish == "1";
}

// Whether a block may take a whole head in the backward pass.
bool takes_whole_heads(const AttentionCudaParams& args, const AttentionCudaBias& bias) {
  return args.dtype != DType::kFloat32 && bias.bucket == nullptr && args.heads == args.kv_heads &&
         !has_window(args);
}

// Which kernels the backward pass takes: with wgmma or without, one fused kernel or two.
struct BackwardChoice {
  bool wgmma, fused;
};

BackwardChoice choose_backward(const AttentionCudaParams& args, const AttentionCudaBias& bias,
                               const AttentionDevice& device) {
  const bool whole = takes_whole_heads(args, bias);
  const int sequences = args.sequences, heads = args.heads, max_q = args.max_q, max_k = args.max_k;
  const bool mma_fused =
      whole && backward_is_fused(sequences, heads, max_q, max_k, args.head_dim, device);
  if (!wgmma_wanted(kBackwardOp) ||
      !has_wgmma(args.dtype, args.head_dim, bias.bucket != nullptr, device))
    return {false, mma_fused};
  const bool fused = whole && args.head_dim == 64 &&
                     wgmma_backward_is_fused(sequences, args.q_tokens, heads, max_q, max_k, device);
  return {!(fused && mma_fused && mma_backward_is_faster(max_q, max_k)), fused};
}

}  // namespace

void attention_forward(const AttentionCudaParams& args, const AttentionCudaBias& bias,
                       std::span<const AttentionGroup> groups, cudaStream_t stream) {
  const AttentionDevice device = this_device(kForwardOp, args.dtype);
  if (bias.bucket != nullptr) prepare_bias(kForwardOp, args, bias, stream);
  const bool wgmma = wgmma_wanted(kForwardOp) &&
                     has_wgmma(args.dtype, args.head_dim, bias.bucket != nullptr, device);
  const uint32_t kept = kept_block_bytes(device);
  for_each_run(
      kForwardOp, args, bias, groups, stream, [&](const AttentionRun& run, cudaStream_t s) {
        if (args.dtype == DType::kFloat32) return launch_fp32_forward(run, s);
        if (wgmma && bias.bucket != nullptr) return launch_wgmma_bias_forward(run, s);
        if (wgmma)
          return dispatch_wgmma_head_dim(
              args.head_dim, [&]<int kHeadDim>() { launch_wgmma_forward<kHeadDim>(run, s); });
        dispatch_head_dim(args.head_dim, [&]<int kHeadDim>() {
          if (bias.bucket != nullptr) return launch_bias_forward<kHeadDim>(run, kept, s);
          launch_forward<kHeadDim>(run, kept, s);
        });
      });
}

int64_t attention_query_sums(const AttentionCudaParams& args, const AttentionCudaBias& bias) {
  const AttentionDevice device = this_device(kBackwardOp, args.dtype);
  const BackwardChoice choice = choose_backward(args, bias, device);
  if (choice.wgmma || !choice.fused) return 0;
  return query_sum_floats(args.q_tokens, args.sequences, args.heads, args.max_k, args.head_dim);
}

void attention_backward(const AttentionCudaParams& args, const AttentionCudaBias& bias,
                        std::span<const AttentionGroup> groups, cudaStream_t stream) {
  const AttentionDevice device = this_device(kBackwardOp, args.dtype);
  if (bias.bucket != nullptr) prepare_bias(kBackwardOp, args, bias, stream);
  const BackwardChoice choice = choose_backward(args, bias, device);
  const uint32_t kept = kept_block_bytes(device);
  for_each_run(kBackwardOp, args, bias, groups, stream,
               [&](const AttentionRun& run, cudaStream_t s) {
                 if (args.dtype == DType::kFloat32) return launch_fp32_backward(run, s);
                 if (choice.wgmma && bias.bucket != nullptr)
                   return launch_wgmma_bias_backward(run, s);
                 if (choice.wgmma)
                   return dispatch_wgmma_head_dim(args.head_dim, [&]<int kHeadDim>() {
                     launch_wgmma_backward<kHeadDim>(run, choice.fused, s);
                   });
                 dispatch_head_dim(args.head_dim, [&]<int kHeadDim>() {
                   if (bias.bucket != nullptr) return launch_bias_backward<kHeadDim>(run, s);
                   const AttentionCudaParams& a = run.args;
                   FusedShape shape;
                   if (choice.fused)
                     shape = fused_shape(a.sequences, a.heads, a.max_q, a.max_k, kHeadDim, device);
                   launch_backward<kHeadDim>(run, shape, kept, s);
                 });
               });
  if (bias.bucket != nullptr) finish_bias(args, bias, stream);
}

}  // namespace bert_unpad::cuda
