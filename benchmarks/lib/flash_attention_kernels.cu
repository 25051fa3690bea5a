// Instantiates one of FlashAttention-2's kernels (head dimension 64, bf16, no mask), or prints the
// layout of what its kernels take; compiled by flash_attention_build.py with the flags of
// FlashAttention-2's own build against its sources, of which nothing is in this repository.
//
// BU_FORWARD or BU_BACKWARD, with BU_DROPOUT and BU_EVEN (all sequences of one length that the
// tiles divide) as true or false: that kernel. Else: main() prints "field offset size" of
// Flash_bwd_params, and sizes of shared memory.
#include <cutlass/numeric_types.h>

#ifdef BU_FORWARD
#include "flash_fwd_launch_template.h"
namespace FLASH_NAMESPACE {
using ForwardTraits =
    Flash_fwd_kernel_traits<64, 128, BU_DROPOUT ? 64 : 128, 4, false, false, cutlass::bfloat16_t>;
template __global__ void
flash_fwd_kernel<ForwardTraits, BU_DROPOUT, false, false, false, BU_EVEN, true, false, false>(
    KERNEL_PARAM_MODIFIER const Flash_fwd_params);
}  // namespace FLASH_NAMESPACE
#else
#include "flash_bwd_launch_template.h"
namespace FLASH_NAMESPACE {
using BackwardTraits =
    Flash_bwd_kernel_traits<64, 128, 128, 8, 4, 4, 4, false, false, cutlass::bfloat16_t>;
#ifdef BU_BACKWARD
template __global__ void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<
    BackwardTraits, BU_DROPOUT, false, false, false, BU_EVEN, true, false>(
    KERNEL_PARAM_MODIFIER const Flash_bwd_params);
#endif
}  // namespace FLASH_NAMESPACE
#endif

#if !defined(BU_FORWARD) && !defined(BU_BACKWARD)
#include <cstddef>
#include <cstdio>

int main() {
  using FLASH_NAMESPACE::Flash_bwd_params;
  using FLASH_NAMESPACE::Flash_fwd_params;
  static Flash_bwd_params p;
  const auto field = [](const char* name, const void* at, size_t size) {
    std::printf("%s %td %zu\n", name,
                static_cast<const char*>(at) - reinterpret_cast<const char*>(&p), size);
  };
#define BU_FIELD(name) field(#name, (const void*)(&p.name), sizeof(p.name))  // drops __restrict__
  BU_FIELD(q_ptr), BU_FIELD(k_ptr), BU_FIELD(v_ptr), BU_FIELD(o_ptr), BU_FIELD(do_ptr);
  BU_FIELD(dq_ptr), BU_FIELD(dk_ptr), BU_FIELD(dv_ptr), BU_FIELD(dq_accum_ptr);
  BU_FIELD(dsoftmax_sum), BU_FIELD(softmax_lse_ptr), BU_FIELD(rng_state);
  BU_FIELD(cu_seqlens_q), BU_FIELD(cu_seqlens_k);
  BU_FIELD(q_batch_stride), BU_FIELD(k_batch_stride), BU_FIELD(v_batch_stride);
  BU_FIELD(o_batch_stride), BU_FIELD(do_batch_stride), BU_FIELD(dq_batch_stride);
  BU_FIELD(dk_batch_stride), BU_FIELD(dv_batch_stride);
  BU_FIELD(q_row_stride), BU_FIELD(k_row_stride), BU_FIELD(v_row_stride);
  BU_FIELD(o_row_stride), BU_FIELD(do_row_stride), BU_FIELD(dq_row_stride);
  BU_FIELD(dk_row_stride), BU_FIELD(dv_row_stride);
  BU_FIELD(q_head_stride), BU_FIELD(k_head_stride), BU_FIELD(v_head_stride);
  BU_FIELD(o_head_stride), BU_FIELD(do_head_stride), BU_FIELD(dq_head_stride);
  BU_FIELD(dk_head_stride), BU_FIELD(dv_head_stride);
  BU_FIELD(h), BU_FIELD(h_k), BU_FIELD(h_h_k_ratio), BU_FIELD(b), BU_FIELD(d);
  BU_FIELD(seqlen_q), BU_FIELD(seqlen_k), BU_FIELD(seqlen_q_rounded);
  BU_FIELD(seqlen_k_rounded), BU_FIELD(d_rounded), BU_FIELD(total_q), BU_FIELD(unpadded_lse);
  BU_FIELD(scale_softmax), BU_FIELD(scale_softmax_log2), BU_FIELD(p_dropout);
  BU_FIELD(p_dropout_in_uint8_t), BU_FIELD(rp_dropout), BU_FIELD(scale_softmax_rp_dropout);
  BU_FIELD(window_size_left), BU_FIELD(window_size_right), BU_FIELD(is_bf16);
  BU_FIELD(is_seqlens_k_cumulative), BU_FIELD(num_splits);
#undef BU_FIELD
  std::printf("sizeof_forward 0 %zu\n", sizeof(Flash_fwd_params));
  std::printf("sizeof_backward 0 %zu\n", sizeof(Flash_bwd_params));
  std::printf("shared_backward 0 %d\n", FLASH_NAMESPACE::BackwardTraits::kSmemSize1colblock);
}
#endif
