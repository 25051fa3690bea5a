// Copies from global to shared memory: by cp.async, past the registers and while the block
// computes; on sm_75, which has none, by a load and a store, after which nothing is left to wait
// for.
//
// A thread's copies up to a commit form a group. copy_async_wait<N>() returns when all but the
// thread's N youngest groups have landed; other threads see the data after a sync_block() that
// follows.
#pragma once

#include <cstdint>

#include "cuda/memory.h"

namespace bert_unpad {

// 16 bytes; zeros where `valid` is false (nothing is read then). Both addresses are multiples of
// 16. Bypasses the L1 cache: other blocks, not this one, read the same rows again.
BU_DEVICE void copy_async_16(uint32_t shared_offset, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_base() + shared_offset),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
               : "memory");
#else
  uint4 x{};
  // Without a branch, so that ptxas may begin all of a thread's loads before it stores the first.
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.u32 valid, %5, 0;\n"
      "@valid ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
      : "l"(__cvta_generic_to_global(global)), "r"(static_cast<int>(valid)));
  store_shared(shared_offset, x);
#endif
}

// 4 bytes, otherwise the same.
BU_DEVICE void copy_async_4(uint32_t shared_offset, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_base() + shared_offset),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 4 : 0)
               : "memory");
#else
  store_shared(shared_offset, valid ? load_global<uint32_t>(global) : 0u);
#endif
}

BU_DEVICE void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kPending>
BU_DEVICE void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace bert_unpad
