// Quantisation to 8 bits. Memory is the limit: one read for the largest value, one to convert. The
// result is written as it is and, for the products of the backward pass, transposed.
//
// Two kernels. The first leaves the largest value of each block; in the second every block finds
// the largest of these, so no third kernel and no atomics are needed. Lists of weights have kernels
// of their own, whose blocks take four tiles of one weight.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/table.h"
#include "cuda/vector.h"
#include "linear/fp8_cuda.h"
#include "linear/fp8_format.h"

namespace bert_unpad::cuda {
namespace {

constexpr const char *kOp = "quantize_fp8", *kWeightsOp = "quantize_weights_fp8_";
constexpr int kThreads = 256, kWarps = kThreads / 32;
// A partial for each thread of the second kernel.
constexpr int kMaxPartials = kThreads;
// Loads in flight of a thread of the first: 2 blocks of 256 threads keep 32 KiB in flight on an SM,
// where an H100 needs some 20 KiB to hide its memory's latency. Not measured.
constexpr int kInFlight = 4;
// A block takes tiles of 64 x 64 numbers, a thread 4 x 4 of them.
constexpr int kTile = 64, kGroups = kTile / 4;
constexpr int64_t kTileElements = kTile * kTile;
// Words of a column of the transposed tile in shared memory: one more than it has, against bank
// conflicts of the threads that write one word of several columns.
constexpr uint32_t kStride = kGroups + 1;
constexpr unsigned kTileBytes = 4 * kTile * kStride, kSharedBytes = kTileBytes + 4 * kWarps;

// The block's largest value, in all threads. Uses shared memory after the tile.
BU_DEVICE float max_over_block(float x) {
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) store_shared(kTileBytes + threadIdx.x / 32 * 4, x);
  sync_block();
#pragma unroll
  for (uint32_t warp = 0; warp < kWarps; ++warp)
    x = fmaxf(x, load_shared<float>(kTileBytes + 4 * warp));
  return x;
}

template <class T>
BU_KERNEL(kThreads, 2)
fp8_largest_kernel(BU_PARAMS QuantizeParams p) {
  constexpr int N = kVectorWidth<T>;
  const int64_t vectors = p.rows * p.columns / N;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const T* x = static_cast<const T*>(p.x);
  float largest = 0.0f;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
       i += step * kInFlight) {
    Vector<T, N> in[kInFlight];
#pragma unroll
    for (int r = 0; r < kInFlight; ++r)
      if (i + r * step < vectors) in[r] = load_vector<T, N>(x + (i + r * step) * N);
#pragma unroll
    for (int r = 0; r < kInFlight; ++r) {
      if (i + r * step >= vectors) break;
#pragma unroll
      for (int k = 0; k < N; ++k) largest = fmaxf(largest, fabsf(to_float(in[r].v[k])));
    }
  }
  largest = max_over_block(largest);
  if (threadIdx.x == 0) store_global(p.partials + blockIdx.x, largest);
}

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

BU_HD int64_t tiles_of(const Fp8Matrix& m) {
  return (m.columns + kTile - 1) / kTile * ((fp8_padded(m.rows) + kTile - 1) / kTile);
}

// What a thread takes of a tile.
template <class T>
struct Patch {
  int64_t first_row, first_column;  // of the tile
  int64_t row, column;
  Vector<T, 4> in[4] = {};  // zeros outside of the matrix

  BU_DEVICE Patch(const Fp8Matrix& m, int64_t tile) {
    const int64_t across = (m.columns + kTile - 1) / kTile;
    first_row = tile / across * kTile;
    first_column = tile % across * kTile;
    row = first_row + 4 * (threadIdx.x / kGroups);
    column = first_column + 4 * (threadIdx.x % kGroups);
    const T* x = static_cast<const T*>(m.x);
#pragma unroll
    for (int r = 0; r < 4; ++r)
      if (has(m, r)) in[r] = load_vector<T, 4>(x + (row + r) * m.columns + column);
  }
  BU_DEVICE bool has(const Fp8Matrix& m, int r) const {
    return column < m.columns && row + r < m.rows;
  }
};

// What a matrix is multiplied with, whose largest value is given. Finite, so that zeros stay zeros
// beside the smallest of subnormal numbers.
template <class Format>
BU_DEVICE float inverse_scale(float largest) {
  return largest > 0.0f ? fminf(Format::kLargest / largest, FLT_MAX) : 1.0f;
}
template <class Format>
BU_DEVICE void store_scale(float* to, float largest) {
  store_global(to, largest > 0.0f ? largest / Format::kLargest : 1.0f);
}

// All threads of the block call it.
template <class T, class Format>
BU_DEVICE void quantize_tile(const Fp8Matrix& m, int64_t tile, float inverse) {
  const Patch<T> patch(m, tile);
  uint32_t words[4] = {};
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (!patch.has(m, r)) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      words[r] |= to_fp8<Format>(to_float(patch.in[r].v[c]) * inverse) << (8 * c);
    store_global(m.q + (patch.row + r) * m.columns + patch.column, words[r]);
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
    const int64_t to_column = patch.first_column + c, to_row = patch.first_row + 4 * word;
    if (to_column < m.columns && to_row < padded_rows)
      store_global(m.q_transposed + to_column * padded_rows + to_row,
                   load_shared<uint32_t>(4 * (c * kStride + word)));
  }
}

template <class T, class Format>
BU_KERNEL(kThreads, 4)
fp8_quantize_kernel(BU_PARAMS QuantizeParams p, int64_t partials) {
  const bool has_partial = threadIdx.x < partials;
  const float largest =
      max_over_block(has_partial ? load_global<float>(p.partials + threadIdx.x) : 0.0f);
  if (blockIdx.x == 0 && threadIdx.x == 0) store_scale<Format>(p.scale, largest);
  const float inverse = inverse_scale<Format>(largest);
  const int64_t tiles = tiles_of(p);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x)
    quantize_tile<T, Format>(p, tile, inverse);
}

struct WeightEntry : Fp8Matrix {
  int64_t size;  // as many elements as its tiles have
};

struct WeightsParams {
  Table<WeightEntry> table;
  float* partials;  // one a chunk of the table
};

BU_KERNEL(kThreads, 4)
fp8_weights_largest_kernel(BU_PARAMS WeightsParams p) {
  const Place at = place_of(p.table, static_cast<int>(blockIdx.x));
  float largest = 0.0f;
  for (int64_t tile = at.begin / kTileElements; tile < at.end / kTileElements; ++tile) {
    const Patch<float> patch(p.table.entries[at.entry], tile);
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(patch.in[i / 4].v[i % 4]));
  }
  largest = max_over_block(largest);
  if (threadIdx.x == 0) store_global(p.partials + blockIdx.x, largest);
}

BU_KERNEL(kThreads, 4)
fp8_weights_quantize_kernel(BU_PARAMS WeightsParams p) {
  const Place at = place_of(p.table, static_cast<int>(blockIdx.x));
  const WeightEntry& weight = p.table.entries[at.entry];
  float largest = 0.0f;
  for (int i = p.table.first[at.entry] + static_cast<int>(threadIdx.x);
       i < p.table.first[at.entry + 1]; i += kThreads)
    largest = fmaxf(largest, load_global<float>(p.partials + i));
  largest = max_over_block(largest);
  if (at.begin == 0 && threadIdx.x == 0) store_scale<E4M3>(weight.scale, largest);
  const float inverse = inverse_scale<E4M3>(largest);
  for (int64_t tile = at.begin / kTileElements; tile < at.end / kTileElements; ++tile)
    quantize_tile<float, E4M3>(weight, tile, inverse);
}

std::vector<WeightEntry> entries_of(const std::vector<Fp8Matrix>& weights) {
  std::vector<WeightEntry> list;
  for (const Fp8Matrix& m : weights) list.push_back({m, tiles_of(m) * kTileElements});
  return list;
}

template <class T>
void run(const QuantizeParams& p, cudaStream_t stream) {
  const int64_t partials = quantize_partials(p);
  launch(kOp, fp8_largest_kernel<T>, dim3(partials), dim3(kThreads), kSharedBytes, stream, p);
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>(tiles_of(p), int64_t{4} * sm_count(kOp)));
  const auto kernel = p.e5m2 ? fp8_quantize_kernel<T, E5M2> : fp8_quantize_kernel<T, E4M3>;
  launch(kOp, kernel, dim3(blocks), dim3(kThreads), kSharedBytes, stream, p, partials);
}

}  // namespace

int64_t quantize_partials(const QuantizeParams& p) {
  const int64_t work = p.rows * p.columns / (kThreads * kInFlight);
  return std::clamp<int64_t>(work, 1, std::min(kMaxPartials, 2 * sm_count(kOp)));
}

void quantize_fp8(const QuantizeParams& p, cudaStream_t stream) {
  dispatch(p.dtype, [&]<class T>() { run<T>(p, stream); });
}

int64_t weight_partials(const std::vector<Fp8Matrix>& weights) {
  return total_chunks(entries_of(weights));
}

void quantize_weights(const std::vector<Fp8Matrix>& weights, float* partials, cudaStream_t stream) {
  for_tables(entries_of(weights), [&](const Table<WeightEntry>& table, int chunks) {
    if (chunks == 0) return;
    const WeightsParams p{table, partials + table.first_chunk};
    for (const auto kernel : {fp8_weights_largest_kernel, fp8_weights_quantize_kernel})
      launch(kWeightsOp, kernel, dim3(chunks), dim3(kThreads), kSharedBytes, stream, p);
  });
}

}  // namespace bert_unpad::cuda
