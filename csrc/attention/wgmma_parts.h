// What the attention kernels with wgmma share.
#pragma once

#include "attention/kernel_parts.h"

namespace bert_unpad {

// 64 rows of a head in shared memory, SharedTile<64>s side by side, as operands.
struct HeadOperand {
  TileOperand<64> first;

  // `address`: shared_base() + the first tile's offset.
  static BU_DEVICE HeadOperand at(uint32_t address) { return {TileOperand<64>::at(address)}; }
  // Rows as m or n; columns 16 * step .. + 15 as k.
  BU_DEVICE TileOperand<64> columns(int step) const { return tile(step / 4).step<false>(step % 4); }
  // Columns 64 * part .. + 63 as m or n; rows 16 * step .. + 15 as k.
  BU_DEVICE TileOperand<64> rows(int step, int part) const { return tile(part).step<true>(step); }

 private:
  BU_DEVICE TileOperand<64> tile(int part) const {
    return {first.low + static_cast<uint32_t>(part) * (SharedTile<64>::bytes(64) / 16)};
  }
};

// Sums of 64 rows and kHeadDim columns: a wgmma's for each 64 columns.
template <int kHeadDim>
using HeadSums = float[kHeadDim / 64][8][4];

template <int kParts>
BU_DEVICE void wgmma_fence_operand(float (&sums)[kParts][8][4]) {
#pragma unroll
  for (auto& part : sums) wgmma_fence_operand(part);
}

template <int kParts>
BU_DEVICE void zero(float (&sums)[kParts][8][4]) {
#pragma unroll
  for (int i = 0; i < 32 * kParts; ++i) sums[i / 32][i / 4 % 8][i % 4] = 0.0f;
}

// sums = a b^T over all columns of a head, [64 x 64]. a from registers or from a tile.
template <class T, int kSteps>
BU_DEVICE void multiply_heads(float (&sums)[8][4], const uint32_t (&a)[kSteps][4], HeadOperand b) {
#pragma unroll
  for (int d = 0; d < kSteps; ++d) wgmma<T, false>(sums, a[d], b.columns(d), d > 0);
}
template <class T, int kSteps>
BU_DEVICE void multiply_heads(float (&sums)[8][4], HeadOperand a, HeadOperand b) {
#pragma unroll
  for (int d = 0; d < kSteps; ++d) wgmma<T, false, false>(sums, a.columns(d), b.columns(d), d > 0);
}

// sums += a b, where the 16 columns of a are rows 16 * step .. + 15 of b, and for all 64 of them.
template <class T, int kParts>
BU_DEVICE void add_rows(float (&sums)[kParts][8][4], const uint32_t (&a)[4], HeadOperand b,
                        int step) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) wgmma<T, true>(sums[part], a, b.rows(step, part), true);
}
template <class T, int kParts>
BU_DEVICE void add_rows(float (&sums)[kParts][8][4], const uint32_t (&a)[4][4], HeadOperand b) {
#pragma unroll
  for (int step = 0; step < 4; ++step) add_rows<T>(sums, a[step], b, step);
}

// Writes sums as rows, as store_rows() does.
template <class T, int kParts>
BU_DEVICE void store_head_rows(const float (&sums)[kParts][8][4], float factor0, float factor1,
                               const HeadRows<T>& rows, int first, int end) {
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    store_rows<T>(sums[part], factor0, factor1, rows, first, end, 64 * part);
}

}  // namespace bert_unpad
