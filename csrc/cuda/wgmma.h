// Tensor cores as sm_90a has them: wgmma.mma_async m64n64k16, with which four warps multiply while
// they do something else. Only kernels in files named *_sm90a.cu may use it: these are compiled for
// sm_90a alone.
//
// A warpgroup is four neighbouring warps, the first one's number a multiple of four. All of its
// threads call these functions together. Its warp w has the rows 16 w .. 16 w + 15 of A and of the
// sums; the lanes hold them as mma.h says of A and C.
//
// B, and A where it does not come from registers, are SharedTile<64>s that begin at multiples of
// 1,024 bytes: their permutation is wgmma's 128-byte swizzle. (That of SharedTile<32> at multiples
// of 512 is its 64-byte swizzle.) A tile's rows are the m or n index and its columns are k
// ("K-major"), or, transposed, the other way round ("MN-major").
//
//   fence_shared();    by the threads that wrote the tiles, before the barrier that precedes wgmma
//   wgmma_fence();     before each group, after the last access to the registers that take part
//   wgmma(...);        once or several times; a warpgroup's products are made in order
//   wgmma_commit();    makes them a group
//   wgmma_wait<N>();   only then may these registers be used again, after keep_in_register(); the
//   tiles, by
//                      other threads, after a barrier that follows
//
// Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Operation" (fragments,
// matrix descriptor, strides, async proxy); the canonical layouts in CUTLASS,
// cute/atom/mma_traits_sm90_gmma.hpp.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/types.h"
#include "cuda/memory.h"

namespace bert_unpad {

// What this thread has stored in shared memory, or copied there and waited for, is there for wgmma
// too after the next barrier.
BU_DEVICE void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

BU_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

BU_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when all but the warpgroup's kPending youngest groups are done.
template <int kPending>
BU_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving what computes or uses these registers across this place: it does
// not know that wgmma uses them after its instruction.
template <int kTiles>
BU_DEVICE void wgmma_fence_operand(float (&registers)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) asm volatile("" : "+f"(registers[i / 4][i % 4]));
}
template <int kTiles>
BU_DEVICE void wgmma_fence_operand(uint32_t (&registers)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) asm volatile("" : "+r"(registers[i / 4][i % 4]));
}

// A SharedTile<kColumns> as an operand, kColumns = 64 or 32: the lower half of its matrix
// descriptor. Bits 0 - 13 are its address / 16. Bits 16 - 29, how far it is to the next kColumns
// columns, do not matter for one tile.
template <int kColumns>
struct TileOperand {
  uint32_t low;

  // `address`: shared_base() + the tile's offset.
  static BU_DEVICE TileOperand at(uint32_t address) {
    return {(address & 0x3ffffu) >> 4 | 1u << 16};
  }
  // 16 * steps further in k: columns of the tile, or, transposed, rows.
  template <bool kTransposed>
  BU_DEVICE TileOperand step(int steps) const {
    return {low + static_cast<uint32_t>(steps) * (kTransposed ? 2 * kColumns : 2)};
  }
  // The upper half: how far it is from 8 rows to the next 8, in 16 bytes (bits 32 - 45); the
  // pattern begins with the tile (bits 49 - 51: 0); 128-byte or 64-byte swizzle (bits 62 - 63: 1 or
  // 2).
  static constexpr uint32_t kHigh = kColumns == 64 ? 1u << 30 | 64 : 2u << 30 | 32;
};

#define BU_DESCRIPTOR(name, low, high) "mov.b64 " name ", {" low ", " high "};\n"
#define BU_WGMMA(type, columns, sums, descriptors, add, operands)                               \
  "{\n.reg .pred p;\n.reg .b64 a, b;\n" descriptors "setp.ne.b32 p, " add                       \
  ", 0;\n"                                                                                      \
  "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" sums "}, " operands \
  ";\n}"
#define BU_NUMBERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BU_NUMBERS_32 \
  BU_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BU_SUMS(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define BU_SUMS_16 BU_SUMS(0), BU_SUMS(1), BU_SUMS(2), BU_SUMS(3)
#define BU_SUMS_32 BU_SUMS_16, BU_SUMS(4), BU_SUMS(5), BU_SUMS(6), BU_SUMS(7)

// d = a b, added to d where `add`; T = bf16 or f16. a [64 x 16] from registers, b [16 x 64] from a
// tile, kTransposedB: whose rows are k.
#define BU_WGMMA_REGISTERS(type)                                                            \
  asm volatile(BU_WGMMA(type, "64", BU_NUMBERS_32, BU_DESCRIPTOR("b", "%36", "%37"), "%38", \
                        "{%32, %33, %34, %35}, b, p, 1, 1, %39")                            \
               : BU_SUMS_32                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.kHigh),      \
                 "r"(static_cast<int>(add)), "n"(static_cast<int>(kTransposedB)))
template <class T, bool kTransposedB>
BU_DEVICE void wgmma(float (&d)[8][4], const uint32_t (&a)[4], TileOperand<64> b, bool add) {
  if constexpr (std::is_same_v<T, bf16>)
    BU_WGMMA_REGISTERS("bf16");
  else
    BU_WGMMA_REGISTERS("f16");
}

// The same with a from a tile, kTransposedA: whose rows are k. b has 64 or 32 columns; 32 in tiles
// whose rows are k only.
#define BU_WGMMA_SHARED(type, columns, numbers, sums, i, j, k, l, m, n, o)                         \
  asm volatile(BU_WGMMA(type, columns, numbers, BU_DESCRIPTOR("a", i, j) BU_DESCRIPTOR("b", k, l), \
                        m, "a, b, p, 1, 1, " n ", " o)                                             \
               : sums                                                                              \
               : "r"(a.low), "r"(a.kHigh), "r"(b.low), "r"(b.kHigh), "r"(static_cast<int>(add)),   \
                 "n"(static_cast<int>(kTransposedA)), "n"(static_cast<int>(kTransposedB)))
#define BU_WGMMA_SHARED_32(type)                                                                   \
  BU_WGMMA_SHARED(type, "32", BU_NUMBERS_16, BU_SUMS_16, "%16", "%17", "%18", "%19", "%20", "%21", \
                  "%22")
#define BU_WGMMA_SHARED_64(type)                                                                   \
  BU_WGMMA_SHARED(type, "64", BU_NUMBERS_32, BU_SUMS_32, "%32", "%33", "%34", "%35", "%36", "%37", \
                  "%38")
template <class T, bool kTransposedA, bool kTransposedB, int kTiles>
BU_DEVICE void wgmma(float (&d)[kTiles][4], TileOperand<64> a, TileOperand<8 * kTiles> b,
                     bool add) {
  static_assert(kTiles == 8 || (kTiles == 4 && kTransposedB));
  if constexpr (std::is_same_v<T, bf16> && kTiles == 8)
    BU_WGMMA_SHARED_64("bf16");
  else if constexpr (std::is_same_v<T, bf16>)
    BU_WGMMA_SHARED_32("bf16");
  else if constexpr (kTiles == 8)
    BU_WGMMA_SHARED_64("f16");
  else
    BU_WGMMA_SHARED_32("f16");
}

#undef BU_DESCRIPTOR
#undef BU_WGMMA
#undef BU_NUMBERS_16
#undef BU_NUMBERS_32
#undef BU_SUMS
#undef BU_SUMS_16
#undef BU_SUMS_32
#undef BU_WGMMA_REGISTERS
#undef BU_WGMMA_SHARED
#undef BU_WGMMA_SHARED_32
#undef BU_WGMMA_SHARED_64

}  // namespace bert_unpad
