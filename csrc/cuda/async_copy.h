// cp.async (sm_80 and later): copies from global to shared memory that bypass registers and run
// while the block computes.
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
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_base() + shared_offset),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
               : "memory");
}

// 4 bytes, otherwise the same.
BU_DEVICE void copy_async_4(uint32_t shared_offset, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_base() + shared_offset),
               "l"(__cvta_generic_to_global(global)), "r"(valid ? 4 : 0)
               : "memory");
}

BU_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
BU_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace bert_unpad
