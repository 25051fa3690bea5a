// Where wgmma finds the elements of a matrix in shared memory, which a 64-bit descriptor says (PTX
// ISA, "Shared Memory Matrix Layout" and "Matrix Descriptor" of wgmma; the canonical layouts are
// also written out in CUTLASS, cute/atom/mma_traits_sm90_gmma.hpp).
//
// A matrix of 16-bit elements has rows along m or n, and 16 columns along k. Memory is in pieces of
// 16 bytes, 8 elements that follow each other along k (K-major) or along m or n (MN-major).
// Swizzled modes keep 2, 4 or 8 pieces in a line of 32, 64 or 128 bytes, without swizzle a line is
// a piece:
//
//   K-major:   a line per row, 8 lines one after the other; the next 8 rows are `stride` bytes on.
//              The piece of columns 8 to 15 is the next one in the line, without swizzle `leading`
//              bytes on.
//   MN-major:  a line per column, 8 lines one after the other; the next 8 columns are `stride`
//   bytes
//              on, and the rows that follow those of a line `leading` bytes. Without swizzle it is
//              the other way round: columns `leading`, rows `stride`.
//
// Of the address that results, the bits that number a piece within a line are xor-ed with as many
// bits from bit 7 on, less the descriptor's base offset, which says where patterns begin.
#pragma once

#include <cstdint>
#include <string>

namespace bert_unpad::ptx {

struct MatrixDescriptor {
  static constexpr uint32_t kPieceBytes = 16, kPieceElements = 8, kColumns = 16;

  // Bytes; addresses are offsets from a multiple of 2^18.
  uint32_t start, leading, stride, base;
  uint32_t line_pieces;  // 1, 2, 4 or 8: the swizzle mode

  static MatrixDescriptor decode(uint64_t bits) {
    constexpr uint32_t kLinePieces[] = {1, 8, 4, 2};
    const auto encoded = [&](int shift) {
      return static_cast<uint32_t>(bits >> shift & 0x3fff) * kPieceBytes;
    };
    return {encoded(0), encoded(16), encoded(32), static_cast<uint32_t>(bits >> 49 & 7),
            kLinePieces[bits >> 62]};
  }
  // "" or what is wrong with the bits.
  static std::string problem(uint64_t bits) {
    constexpr uint64_t kUsed =
        0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 7ull << 49 | 3ull << 62;
    if ((bits & ~kUsed) != 0)
      return "bits of a matrix descriptor are set that have no meaning (an address needs "
             "& 0x3ffff before it is shifted)";
    return "";
  }

  // Of the piece that holds an element.
  uint32_t address(bool k_major, uint32_t row, uint32_t column) const {
    const uint32_t line = line_pieces * kPieceBytes, piece = row / kPieceElements;
    uint32_t at = start;
    if (k_major)
      at +=
          piece * stride + row % 8 * line + column / 8 * (line_pieces == 1 ? leading : kPieceBytes);
    else if (line_pieces == 1)
      at += piece * stride + column % 8 * line + column / 8 * leading;
    else
      at += piece / line_pieces * leading + piece % line_pieces * kPieceBytes + column % 8 * line +
            column / 8 * stride;
    return at ^ (((at >> 7) - base) & (line_pieces - 1)) * kPieceBytes;
  }

  // f(address, row, column) of the first element of each piece of some rows, 8 or more.
  template <class F>
  void for_pieces(bool k_major, uint32_t first_row, uint32_t rows, const F& f) const {
    const uint32_t row_step = k_major ? 1 : kPieceElements;
    const uint32_t column_step = k_major ? kPieceElements : 1;
    for (uint32_t row = first_row; row < first_row + rows; row += row_step)
      for (uint32_t column = 0; column < kColumns; column += column_step)
        f(address(k_major, row, column), row, column);
  }
};

}  // namespace bert_unpad::ptx
