// Attention in fp32; see fp32_kernels.h.
#include "attention/fp32_kernels.h"
#include "attention/launch.h"

namespace bert_unpad::cuda {
namespace {

constexpr int kThreads = 32 * kFp32Warps;

// f.operator()<head dim>()
template <class F>
void dispatch_head_dim(int head_dim, const F& f) {
  if (head_dim == 32) return f.template operator()<32>();
  if (head_dim == 64) return f.template operator()<64>();
  f.template operator()<128>();
}

}  // namespace

void launch_fp32_forward(const AttentionRun& run, cudaStream_t stream) {
  dispatch_head_dim(run.args.head_dim, [&]<int kHeadDim>() {
    launch_grid(kForwardOp, attention_fp32_forward_kernel<kHeadDim>, kThreads,
                Fp32Shared<kHeadDim>::kBytes, run, run.args.max_q, kFp32Rows, stream);
  });
}

void launch_fp32_backward(const AttentionRun& run, cudaStream_t stream) {
  dispatch_head_dim(run.args.head_dim, [&]<int kHeadDim>() {
    launch_grid(kBackwardOp, attention_fp32_backward_dq_kernel<kHeadDim>, kThreads,
                Fp32Shared<kHeadDim>::kBytes, run, run.args.max_q, kFp32Rows, stream);
    launch_grid(kBackwardOp, attention_fp32_backward_kernel<kHeadDim>, kThreads,
                Fp32Shared<kHeadDim>::kBytes, run, run.args.max_k, kFp32Rows, stream);
  });
}

}  // namespace bert_unpad::cuda
