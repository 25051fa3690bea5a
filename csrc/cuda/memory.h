// Shared and global memory.
//
// Shared memory is a block's dynamic shared memory, addressed by byte offsets: that is what
// ldmatrix and cp.async take, and what the model of a block can check.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace bert_unpad {

extern __shared__ __align__(1024) unsigned char block_shared_memory[];

// The address of offset 0 in the shared window, for PTX. On sm_90 it takes a few instructions;
// where it counts, keep_in_register() it.
BU_DEVICE uint32_t shared_base() {
  return static_cast<uint32_t>(__cvta_generic_to_shared(block_shared_memory));
}

// V: float, uint32_t or a struct of 8 or 16 bytes; the offset must be a multiple of its size.
template <class V>
BU_DEVICE V load_shared(uint32_t offset) {
  return *reinterpret_cast<const V*>(block_shared_memory + offset);
}

template <class V>
BU_DEVICE void store_shared(uint32_t offset, const V& value) {
  *reinterpret_cast<V*>(block_shared_memory + offset) = value;
}

template <class V>
BU_DEVICE V load_global(const void* p) {
  return *static_cast<const V*>(p);
}

template <class V>
BU_DEVICE void store_global(void* p, const V& value) {
  *static_cast<V*>(p) = value;
}

}  // namespace bert_unpad
