// Global memory as kernels on the model of a block see it.
#pragma once

#include <cstdint>

#include "gpu_model/block/block.h"
#include "gpu_model/block/buffers.h"

namespace bert_unpad::block_model {

class GlobalMemory : public Buffers {
 public:
  // Fails where Buffers do not allow an access.
  void check(const void* p, uint32_t bytes, bool write, const char* what, const Site& site) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    if (!allow(address, bytes, write)) block.fail(site, problem(what, address, bytes));
  }
};

inline GlobalMemory global_memory;

}  // namespace bert_unpad::block_model
