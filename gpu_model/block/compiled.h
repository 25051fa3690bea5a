// Lets launches run what nvcc made of a kernel (gpu_model/ptx) in the place of its source. Both
// libraries are loaded into one process; this is all that they know of each other.
#pragma once

#include <cstdint>

#include "gpu_model/block/buffers.h"

namespace bert_unpad::block_model {

struct Statistics {
  int64_t mma = 0, load_matrices = 0;
  // Of load_matrices, beyond one per 8 x 8 matrix.
  int64_t bank_conflict_cycles = 0;
  int64_t collectives = 0;  // warp-wide operations of any kind
  int64_t switches = 0;     // between threads, or between compiled kernels' warps
};

// As interpreter.py declares it too.
struct LaunchSettings {
  unsigned grid[3], block[3];
  uint32_t shared_bytes;
  const void* const* arguments;
  const uint32_t* argument_bytes;
  uint32_t argument_count;
  int policy;  // this and the seed: what block_model.py configures
  uint64_t seed;
};

struct CompiledLaunch : LaunchSettings {
  const char* op;      // the launch's name in messages
  const void* kernel;  // host function: its symbol is the name of the compiled kernel
  const char* entry;   // the compiled kernel's name, where there is no host function
  bool races;
  Buffers* buffers;
  Statistics* statistics;
  // Counts that `threads` pass a barrier or wait; false where it is to be ignored.
  bool (*pass_site)(const char* kind, const char* file, unsigned line, int64_t threads);
};

// Null, or what went wrong; valid until the next call.
using RunCompiled = const char* (*)(void* module, const CompiledLaunch&);

struct CompiledKernels {
  RunCompiled run = nullptr;
  void* module = nullptr;
};

inline CompiledKernels compiled_kernels;

}  // namespace bert_unpad::block_model
