// How a tile of 16-bit rows lies in shared memory.
//
// ldmatrix reads 16-byte pieces of 8 rows at once. In plain rows of 64, 128 or 256 bytes these are
// all in the same banks; permuting the pieces of a row by its number spreads them over all 32.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace bert_unpad {

// `kColumns` = 32, 64, 96 or 128 elements a row.
template <int kColumns>
struct SharedTile {
  static_assert(kColumns == 32 || kColumns == 64 || kColumns == 96 || kColumns == 128);
  // Neighbouring pieces that are permuted among themselves. Rows of 64 and 192 bytes begin in one
  // of two halves of the 128 bytes of all banks; the next rows of the same half differ in their
  // key.
  static constexpr bool kHalves = kColumns == 32 || kColumns == 96;
  static constexpr int kPieces = kColumns / 8;  // 16-byte pieces of a row
  static constexpr uint32_t kRowBytes = 2 * kColumns;

  static constexpr uint32_t bytes(int rows) { return rows * kRowBytes; }

  // Byte offset within the tile of columns 8 * piece .. 8 * piece + 7 of a row.
  BU_HD static uint32_t offset(int row, int piece) {
    const int key = kHalves ? (row >> 1) & 3 : row & 7;
    return static_cast<uint32_t>(row) * kRowBytes + static_cast<uint32_t>(piece ^ key) * 16;
  }

  // From the offset of piece 0 or 1 of a row to that of piece 2 * step or 2 * step + 1. The same
  // for all rows, one instruction and a constant at most; the tile must begin at a multiple of 256.
  BU_HD static uint32_t columns_on(uint32_t offset, int step) {
    if constexpr (kHalves)
      return (offset ^ static_cast<uint32_t>(32 * (step % 2))) + 64 * (step / 2);
    return offset ^ static_cast<uint32_t>(32 * step);
  }
};

}  // namespace bert_unpad
