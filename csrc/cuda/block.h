// Threads of a block: barriers, shuffles, votes, and BU_REQUIRE, which stops a kernel on wrong
// arguments.
#pragma once

#include <cassert>
#include <cstdint>

#include "common/macros.h"

namespace bert_unpad {

// Waits for all threads of the block; orders their accesses to shared and global memory.
BU_DEVICE void sync_block() { __syncthreads(); }

// The same for the 32 threads of a warp.
BU_DEVICE void sync_warp() { __syncwarp(); }

// The value of the lane whose number differs by `mask`; all 32 lanes take part.
BU_DEVICE float shuffle_xor(float value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
BU_DEVICE uint32_t shuffle_xor(uint32_t value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

// The first lane's value; all 32 lanes take part. The compiler may keep it in a uniform register.
BU_DEVICE uint32_t first_lane(uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); }

// Bit l is lane l's vote; all 32 lanes take part.
BU_DEVICE uint32_t ballot(bool vote) { return __ballot_sync(0xffffffffu, vote); }

// Adds 1 to a counter in global memory, or sets it back to 0 where it is `last`; returns what it
// was. What this thread did before, and what others did before a barrier, comes before the call;
// what blocks did before their calls for the counter, if those are counted already, comes before
// what follows it.
BU_DEVICE uint32_t take_ticket(uint32_t* counter, uint32_t last) {
  uint32_t taken;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(taken)
               : "l"(__cvta_generic_to_global(counter)), "r"(last)
               : "memory");
  return taken;
}

// The value itself, which the compiler will keep in a register and not compute again at each use.
BU_DEVICE uint32_t keep_in_register(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Ends a kernel that no launcher chooses on the architecture that is compiled for. nvcc compiles
// nothing of what would follow.
BU_DEVICE void leave_out() {
  __trap();
  __builtin_unreachable();
}

// Keeps loads from shared memory that follow from being moved before this place on sm_75, where
// ptxas would otherwise run out of registers. All 32 lanes take part.
BU_DEVICE void keep_loads_behind() {
#if __CUDA_ARCH__ < 800
  __syncwarp();
#endif
}

// Fails an assertion, and does not return: so registers need not be kept for what follows, of which
// there are too few on sm_75, sm_100 and sm_120.
BU_DEVICE void fail_assertion(const char* message, const char* file, unsigned line) {
  __assert_fail(message, file, line, "bert_unpad");
#if __CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1000
  __builtin_unreachable();
#endif
}

// Arguments that only the device can see (the values in cu_seqlens) and that do not fit end the
// kernel: PyTorch reports "device-side assert triggered", and the message is on stderr. A file with
// BU_REQUIRE_TRAPS ends it without a message, and PyTorch reports a launch failure: the message is
// written by a function, and ptxas waits for each wgmma at once in a kernel that calls one.
#ifdef BU_REQUIRE_TRAPS
#define BU_REQUIRE(condition, message) \
  do {                                 \
    if (!(condition)) __trap();        \
  } while (false)
#else
#define BU_REQUIRE(condition, message)                             \
  do {                                                             \
    if (!(condition)) fail_assertion(message, __FILE__, __LINE__); \
  } while (false)
#endif

}  // namespace bert_unpad
