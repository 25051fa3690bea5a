// How a tile of 16-bit rows lies in shared memory.
//
// ldmatrix reads 16-byte pieces of 8 rows at once. In plain rows of 64, 128 or 256 bytes these are
// all in the same banks; permuting the pieces of a row by its number spreads them over all 32.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace bert_unpad {

// `kColumns` = 32, 64 or 128 elements a row.
template <int kColumns>
struct SharedTile {
  static_assert(kColumns == 32 || kColumns == 64 || kColumns == 128);
  static constexpr int kPieces = kColumns / 8;  // 16-byte pieces of a row
  static constexpr uint32_t kRowBytes = 2 * kColumns;

  static constexpr uint32_t bytes(int rows) { return rows * kRowBytes; }

  // Byte offset within the tile of columns 8 * piece .. 8 * piece + 7 of a row.
  BU_HD static uint32_t offset(int row, int piece) {
    // Two rows of 64 bytes share a line of 128.
    const int key = kColumns == 32 ? (row >> 1) & 3 : row & 7;
    return static_cast<uint32_t>(row) * kRowBytes + static_cast<uint32_t>(piece ^ key) * 16;
  }

  // From the offset of piece 0 or 1 of a row to that of piece 2 * step or 2 * step + 1. One
  // instruction, the same for all rows; the tile must begin at a multiple of 256.
  BU_HD static uint32_t columns_on(uint32_t offset, int step) {
    return offset ^ static_cast<uint32_t>(32 * step);
  }
};

}  // namespace bert_unpad
