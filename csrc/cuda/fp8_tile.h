// Writing a matrix in 8 bits, a tile of 64 x 64 numbers at a time: as it is and, for the products
// of the backward pass, transposed. A block has 256 threads, each of which has 4 x 4 numbers of a
// tile.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/macros.h"
#include "cuda/fp8_format.h"
#include "cuda/fp8_result.h"
#include "cuda/primitives.h"
#include "cuda/reduce.h"
#include "cuda/vector.h"

namespace bert_unpad::cuda::fp8 {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;
inline constexpr int kTile = kFp8Tile, kGroups = kTile / 4;
inline constexpr int64_t kTileElements = kTile * kTile;
// Words of a column of the transposed tile in shared memory: one more than it has, against bank
// conflicts of the threads that write one word of several columns.
inline constexpr uint32_t kStride = kGroups + 1;
inline constexpr unsigned kTileBytes = 4 * kTile * kStride;
inline constexpr unsigned kMaxBytes = 4 * kWarps;
inline constexpr unsigned kSharedBytes = kTileBytes + kMaxBytes;

BU_HD int64_t tiles_of(const Fp8Result& m) {
  return (m.columns + kTile - 1) / kTile * fp8_tile_rows(m);
}

// Where a thread's part of a tile lies.
struct Patch {
  int64_t first_row, first_column;  // of the tile
  int64_t row, column;

  BU_DEVICE Patch(const Fp8Result& m, int64_t tile) {
    // In 32 bits, whose division is a third of the instructions: a tile has 2^12 numbers.
    const auto across = static_cast<uint32_t>((m.columns + kTile - 1) / kTile);
    const auto number = static_cast<uint32_t>(tile);
    first_row = int64_t{number / across} * kTile;
    first_column = int64_t{number % across} * kTile;
    row = first_row + 4 * (threadIdx.x / kGroups);
    column = first_column + 4 * (threadIdx.x % kGroups);
  }
  // The patch's first number.
  BU_DEVICE int64_t begin(const Fp8Result& m) const { return row * m.columns + column; }
  // Whether the matrix has the patch's row r.
  BU_DEVICE bool has(const Fp8Result& m, int r) const {
    return column < m.columns && row + r < m.rows;
  }
};

// A thread's part of a matrix; zeros outside of it.
template <class T>
BU_DEVICE void load_patch(const Fp8Result& m, const Patch& at, const void* x,
                          Vector<T, 4> (&in)[4]) {
  const T* from = static_cast<const T*>(x) + at.begin(m);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    in[r] = {};
    if (at.has(m, r)) in[r] = load_vector<T, 4>(from + r * m.columns);
  }
}

// The block's largest value, in all threads. Uses kMaxBytes of shared memory from `shared` on.
BU_DEVICE float max_over_block(float x, uint32_t shared = kTileBytes) {
  x = warp_max(x);
  const uint32_t thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (thread % 32 == 0) store_shared(shared + thread / 32 * 4, x);
  sync_block();
#pragma unroll
  for (uint32_t warp = 0; warp < kWarps; ++warp)
    x = fmaxf(x, load_shared<float>(shared + 4 * warp));
  return x;
}

// Keeps the largest value of all threads of the block, where it is above what is there.
BU_DEVICE void note_largest(float* largest, float x, uint32_t shared = kTileBytes) {
  if (largest == nullptr) return;
  x = max_over_block(x, shared);
  if (threadIdx.x == 0 && threadIdx.y == 0)
    store_global(largest + blockIdx.x, fmaxf(x, load_global<float>(largest + blockIdx.x)));
}

// Infinities become NaN, which rounding keeps.
BU_DEVICE float nan_unless_finite(float x) { return x + (x - x); }

// Row i of four words becomes column i.
BU_DEVICE void transpose_bytes(uint32_t (&words)[4]) {
  // Bytes 0 and 1 of two rows, then bytes 2 and 3.
  const uint32_t upper[2] = {permute_bytes(words[0], words[1], 0x5140u),
                             permute_bytes(words[0], words[1], 0x7362u)};
  const uint32_t lower[2] = {permute_bytes(words[2], words[3], 0x5140u),
                             permute_bytes(words[2], words[3], 0x7362u)};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = permute_bytes(upper[i / 2], lower[i / 2], i % 2 == 0 ? 0x5410u : 0x7632u);
}

// Writes a tile of 4 x 4 numbers x(row, column) of each thread, times `inverse`. All threads of the
// block call it.
template <class Format, class X>
BU_DEVICE void store_tile(const Fp8Result& m, const Patch& at, float inverse, const X& x) {
  uint32_t words[4] = {};
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (!at.has(m, r)) continue;
    float scaled[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) scaled[c] = x(r, c) * inverse;
    words[r] = to_fp8_word<Format>(scaled);
    store_global(m.q + at.begin(m) + r * m.columns, words[r]);
  }
  if (m.q_transposed == nullptr) return;
  transpose_bytes(words);
  const uint32_t group = threadIdx.x / kGroups, word = threadIdx.x % kGroups;
  sync_block();  // the tile before has left shared memory
#pragma unroll
  for (uint32_t c = 0; c < 4; ++c) store_shared(4 * ((4 * word + c) * kStride + group), words[c]);
  sync_block();
  // Every 16th column, and of it a word.
  const int64_t padded_rows = fp8_padded(m.rows), row = at.first_row + 4 * word;
  if (row >= padded_rows) return;
  const int64_t column = at.first_column + group;
  uint8_t* to = m.q_transposed + column * padded_rows + row;
#pragma unroll
  for (uint32_t c = 0; c < kTile; c += kGroups)
    if (column + c < m.columns)
      store_global(to + c * padded_rows, load_shared<uint32_t>(4 * ((group + c) * kStride + word)));
}

// Writes the sums of a tile's columns to `partials` [fp8_tile_rows, columns]. `sums`: of the four
// rows of a thread. All threads of the block call it; uses kSumsBytes of shared memory.
inline constexpr unsigned kSumsBytes = 4 * kGroups * kTile;
BU_DEVICE void store_sums(const Fp8Result& m, const Patch& at, const float (&sums)[4],
                          float* partials, uint32_t shared) {
  sync_block();  // the sums of the tile before are read
  store_shared_row(shared + 16 * threadIdx.x, sums);
  sync_block();
  const int64_t column = at.first_column + threadIdx.x;
  if (threadIdx.x >= kTile || column >= m.columns) return;
  float sum = 0.0f;
#pragma unroll
  for (uint32_t group = 0; group < kGroups; ++group)
    sum += load_shared<float>(shared + 4 * (group * kTile + threadIdx.x));
  store_global(partials + at.first_row / kTile * m.columns + column, sum);
}

}  // namespace bert_unpad::cuda::fp8
