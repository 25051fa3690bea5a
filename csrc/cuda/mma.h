// Tensor cores as sm_80 and all later ones have them: mma.sync m16n8k16 on 16-bit operands with
// fp32 sums, and ldmatrix, which brings operands from shared memory into its layout. On sm_75 two
// m16n8k8 take its place, of fp16 only.
//
// Of a matrix tile, lane l with g = l / 4 and t = l % 4 holds, as pairs of neighbouring columns
// (PTX ISA, "Matrix Fragments for mma.m16n8k16"):
//   A [16 x 16]: a0 = (g, 2t), a1 = (g + 8, 2t), a2 = (g, 2t + 8), a3 = (g + 8, 2t + 8)
//   B [16 x 8]:  b0 = rows 2t, 2t + 1 and b1 = rows 2t + 8, 2t + 9 of column g
//   C [16 x 8]:  c0, c1 = (g, 2t), (g, 2t + 1); c2, c3 = the same of row g + 8
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/types.h"
#include "cuda/block.h"
#include "cuda/memory.h"

namespace bert_unpad {

// Two fp32 values as a pair of 16-bit ones, `low` in the lower half.
template <class T>
BU_DEVICE uint32_t pack(float low, float high);
template <>
BU_DEVICE uint32_t pack<bf16>(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  const auto rounded = [](float x) {  // to nearest even; NaNs become 0x7fff
    const uint32_t bits = __float_as_uint(x);
    return x == x ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : 0x7fffu;
  };
  return rounded(low) | rounded(high) << 16;
#endif
}
template <>
BU_DEVICE uint32_t pack<f16>(float low, float high) {
  uint32_t pair;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  const __half2 halves = __floats2half2_rn(low, high);
  memcpy(&pair, &halves, sizeof(pair));
#endif
  return pair;
}

struct alignas(8) FloatPair {
  float low, high;
};

template <class T>
BU_DEVICE FloatPair unpack(uint32_t pair);
template <>
BU_DEVICE FloatPair unpack<bf16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <>
BU_DEVICE FloatPair unpack<f16>(uint32_t pair) {
  __half2 halves;
  memcpy(&halves, &pair, sizeof(pair));
  return {__low2float(halves), __high2float(halves)};
}

// Four 8 x 8 matrices of 16-bit elements from shared memory. Lane l gives the address,
// shared_base() + offset, of row l % 8 of matrix l / 8 (16 bytes, aligned); r[i] gets of matrix i
// the pair at (row l / 4, column 2 (l % 4)), or of its transpose.
BU_DEVICE void load_matrices(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}
BU_DEVICE void load_matrices_transposed(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

// c += a b, T = bf16 or f16. Not bf16 on sm_75, which operators refuse there
// (cuda/capability.h).
template <class T>
BU_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
BU_DEVICE void mma<bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  leave_out();
#endif
}
template <>
BU_DEVICE void mma<f16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const uint32_t b[2] = {b0, b1};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}

}  // namespace bert_unpad
