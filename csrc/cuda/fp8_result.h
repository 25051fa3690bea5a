// What a kernel writes in 8 bits.
#pragma once

#include <cstdint>

namespace bert_unpad::cuda {

// Rows of a transposed matrix are padded with zeros to a multiple of this, as cuBLASLt requires.
inline constexpr int64_t kFp8Multiple = 16;
inline constexpr int64_t fp8_padded(int64_t n) {
  return (n + kFp8Multiple - 1) / kFp8Multiple * kFp8Multiple;
}

// A matrix [rows, columns], columns a multiple of 16; its addresses are multiples, too.
struct Fp8Result {
  int64_t rows, columns;
  uint8_t* q;             // [rows, columns]
  uint8_t* q_transposed;  // [columns, fp8_padded(rows)]; null: not wanted
};

// Rows and columns of a tile of the kernels that write it, and how many rows of tiles there are:
// those of partial sums of the columns.
inline constexpr int kFp8Tile = 64;
inline constexpr int64_t fp8_tile_rows(const Fp8Result& m) {
  return (fp8_padded(m.rows) + kFp8Tile - 1) / kFp8Tile;
}

// Blocks at most of a kernel that notes the largest value, each in a place of its own.
inline constexpr int64_t kFp8Largest = 1024;

}  // namespace bert_unpad::cuda
