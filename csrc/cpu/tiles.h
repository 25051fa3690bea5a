// The tile registers of AMX: 8 tiles of 16 rows of 64 bytes, and their products of bf16 pairs, and
// of 8-bit numbers.
//
// A tile of C holds 16 x 16 numbers of 32 bits, one of A 16 rows of 32 bf16 or 64 unsigned bytes,
// one of B 16 pairs or fours of rows of 16 columns, side by side, of bf16 or signed bytes.
// BU_TILE_MODEL names a header with a software model of the same functions, for CPUs without AMX;
// the assembler is used directly, so no compiler flag is needed.
#pragma once

#include "cpu/simd.h"

#if defined(BU_TILE_MODEL)
#include BU_TILE_MODEL
#else

namespace bert_unpad::BERT_UNPAD_ISA {

// All tiles full, for this thread; the destructor gives the registers back, so that the system need
// not save them.
class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileRegisters() { asm volatile("tilerelease" :::); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

template <int kTile>
BU_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// Rows are `stride` bytes apart.
template <int kTile>
BU_INLINE void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
BU_INLINE void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
// C += A B
template <int kC, int kA, int kB>
BU_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

// The same of bytes, with exact sums.
template <int kC, int kA, int kB>
BU_INLINE void tile_multiply_bytes() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

}  // namespace bert_unpad::BERT_UNPAD_ISA

#endif
