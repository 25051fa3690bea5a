// Variable-length attention: from a call to launches. Kernels are chosen once for the whole call;
// groups only choose grids and tile shapes. So groups change no bit of a result.
#include "attention/choice.h"
#include "attention/launch.h"
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

AttentionDevice this_device(const char* op) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), op);
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), op);
    return value;
  };
  return {attribute(cudaDevAttrMultiProcessorCount),
          static_cast<uint32_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)),
          10 * attribute(cudaDevAttrComputeCapabilityMajor) +
              attribute(cudaDevAttrComputeCapabilityMinor)};
}

}  // namespace

void attention_forward(const AttentionCudaParams& args, const AttentionCudaBias& bias,
                       std::span<const AttentionGroup> groups, cudaStream_t stream) {
  if (bias.bucket != nullptr) prepare_bias(kForwardOp, args, bias, stream);
  const bool wgmma =
      has_wgmma(args.dtype, args.head_dim, bias.bucket != nullptr, this_device(kForwardOp));
  for_each_run(kForwardOp, args, bias, groups, stream,
               [&](const AttentionRun& run, cudaStream_t s) {
                 if (args.dtype == DType::kFloat32) return launch_fp32_forward(run, s);
                 if (wgmma) return launch_wgmma_forward(run, s);
                 dispatch_head_dim(args.head_dim, [&]<int kHeadDim>() {
                   if (bias.bucket != nullptr) return launch_bias_forward<kHeadDim>(run, s);
                   launch_forward<kHeadDim>(run, s);
                 });
               });
}

void attention_backward(const AttentionCudaParams& args, const AttentionCudaBias& bias,
                        std::span<const AttentionGroup> groups, cudaStream_t stream) {
  if (bias.bucket != nullptr) prepare_bias(kBackwardOp, args, bias, stream);
  const AttentionDevice device = this_device(kBackwardOp);
  const bool whole_heads = args.heads == args.kv_heads && !has_window(args);
  const bool fused = whole_heads && backward_is_fused(args.sequences, args.heads, args.max_q,
                                                      args.max_k, args.head_dim, device);
  const bool wgmma =
      whole_heads && has_wgmma(args.dtype, args.head_dim, bias.bucket != nullptr, device) &&
      wgmma_backward_is_fused(args.sequences, args.heads, args.max_q, args.max_k, device);
  for_each_run(kBackwardOp, args, bias, groups, stream,
               [&](const AttentionRun& run, cudaStream_t s) {
                 if (args.dtype == DType::kFloat32) return launch_fp32_backward(run, s);
                 if (wgmma) return launch_wgmma_backward(run, s);
                 dispatch_head_dim(args.head_dim, [&]<int kHeadDim>() {
                   if (bias.bucket != nullptr) return launch_bias_backward<kHeadDim>(run, s);
                   launch_backward<kHeadDim>(run, fused, s);
                 });
               });
  if (bias.bucket != nullptr) finish_bias(args, bias, stream);
}

}  // namespace bert_unpad::cuda
