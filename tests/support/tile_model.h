// A software model of AMX's tile registers, in place of csrc/cpu/tiles.h's instructions. Products
// are computed as Intel's manual describes TDPBF16PS: even and odd numbers of the depth are summed
// up on their own in fp32, from zero and by fused multiply-adds, and both sums are added to C.
// Denormal numbers count as zero.
#pragma once

#include <cmath>

namespace bert_unpad::BERT_UNPAD_ISA {

inline thread_local uint8_t tile_rows[8][16][64];

struct TileRegisters {
  TileRegisters() { std::memset(tile_rows, 0xff, sizeof tile_rows); }  // NaN: nothing is loaded yet
};

template <int kTile>
void tile_zero() {
  std::memset(tile_rows[kTile], 0, sizeof tile_rows[kTile]);
}
template <int kTile>
void tile_load(const void* p, int64_t stride) {
  for (int i = 0; i < 16; ++i)
    std::memcpy(tile_rows[kTile][i], static_cast<const char*>(p) + i * stride, 64);
}
template <int kTile>
void tile_store(void* p, int64_t stride) {
  for (int i = 0; i < 16; ++i)
    std::memcpy(static_cast<char*>(p) + i * stride, tile_rows[kTile][i], 64);
}

inline float without_denormals(float x) { return std::fabs(x) < 0x1p-126f ? 0.0f * x : x; }
inline float bf16_at(const uint8_t* row, int i) {
  uint16_t bits;
  std::memcpy(&bits, row + 2 * i, 2);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return without_denormals(x);
}

template <int kC, int kA, int kB>
void tile_multiply() {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      float sums[2] = {};
      for (int k = 0; k < 16; ++k)
        for (int half = 0; half < 2; ++half)
          sums[half] =
              without_denormals(std::fma(bf16_at(tile_rows[kA][m], 2 * k + half),
                                         bf16_at(tile_rows[kB][k], 2 * n + half), sums[half]));
      float c;
      std::memcpy(&c, tile_rows[kC][m] + 4 * n, 4);
      c = without_denormals(without_denormals(c) + without_denormals(sums[0] + sums[1]));
      std::memcpy(tile_rows[kC][m] + 4 * n, &c, 4);
    }
}

template <int kC, int kA, int kB>
void tile_multiply_bytes() {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      int32_t c;
      std::memcpy(&c, tile_rows[kC][m] + 4 * n, 4);
      for (int k = 0; k < 64; ++k)
        c += tile_rows[kA][m][k] * static_cast<int8_t>(tile_rows[kB][k / 4][4 * n + k % 4]);
      std::memcpy(tile_rows[kC][m] + 4 * n, &c, 4);
    }
}

}  // namespace bert_unpad::BERT_UNPAD_ISA
