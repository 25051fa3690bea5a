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
inline constexpr int kTile = 64, kGroups = kTile / 4;
inline constexpr int64_t kTileElements = kTile * kTile;
// Words of a column of the transposed tile in shared memory: one more than it has, against bank
// conflicts of the threads that write one word of several columns.
inline constexpr uint32_t kStride = kGroups + 1;
inline constexpr unsigned kTileBytes = 4 * kTile * kStride;
inline constexpr unsigned kMaxBytes = 4 * kWarps;
inline constexpr unsigned kSharedBytes = kTileBytes + kMaxBytes;

BU_HD int64_t tiles_of(const Fp8Result& m) {
  return (m.columns + kTile - 1) / kTile * ((fp8_padded(m.rows) + kTile - 1) / kTile);
}

// Where a thread's part of a tile lies.
struct Patch {
  int64_t first_row, first_column;  // of the tile
  int64_t row, column;

  BU_DEVICE Patch(const Fp8Result& m, int64_t tile) {
    const int64_t across = (m.columns + kTile - 1) / kTile;
    first_row = tile / across * kTile;
    first_column = tile % across * kTile;
    row = first_row + 4 * (threadIdx.x / kGroups);
    column = first_column + 4 * (threadIdx.x % kGroups);
  }
  // Whether the matrix has the patch's row r.
  BU_DEVICE bool has(const Fp8Result& m, int r) const {
    return column < m.columns && row + r < m.rows;
  }
};

// A thread's part of a matrix; zeros outside of it.
template <class T>
BU_DEVICE void load_patch(const Fp8Result& m, const Patch& at, const void* x,
                          Vector<T, 4> (&in)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    in[r] = {};
    if (at.has(m, r))
      in[r] = load_vector<T, 4>(static_cast<const T*>(x) + (at.row + r) * m.columns + at.column);
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
  uint32_t columns[4] = {};
#pragma unroll
  for (int row = 0; row < 4; ++row) {
#pragma unroll
    for (int column = 0; column < 4; ++column)
      columns[column] |= (words[row] >> (8 * column) & 0xffu) << (8 * row);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = columns[i];
}

// Writes a tile of 4 x 4 numbers x(row, column) of each thread, times `inverse`. All threads of the
// block call it.
template <class Format, class X>
BU_DEVICE void store_tile(const Fp8Result& m, const Patch& at, float inverse, const X& x) {
  uint32_t words[4] = {};
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (!at.has(m, r)) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c) words[r] |= to_fp8<Format>(x(r, c) * inverse) << (8 * c);
    store_global(m.q + (at.row + r) * m.columns + at.column, words[r]);
  }
  if (m.q_transposed == nullptr) return;
  transpose_bytes(words);
  const int row_group = threadIdx.x / kGroups, column_group = threadIdx.x % kGroups;
  sync_block();  // the tile before has left shared memory
#pragma unroll
  for (uint32_t c = 0; c < 4; ++c)
    store_shared(4 * ((4 * column_group + c) * kStride + row_group), words[c]);
  sync_block();
  const int64_t padded_rows = fp8_padded(m.rows);
#pragma unroll
  for (uint32_t i = threadIdx.x; i < kTile * kGroups; i += kThreads) {
    const uint32_t c = i / kGroups, word = i % kGroups;
    const int64_t to_column = at.first_column + c, to_row = at.first_row + 4 * word;
    if (to_column < m.columns && to_row < padded_rows)
      store_global(m.q_transposed + to_column * padded_rows + to_row,
                   load_shared<uint32_t>(4 * (c * kStride + word)));
  }
}

}  // namespace bert_unpad::cuda::fp8
