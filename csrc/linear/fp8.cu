// Quantisation to 8 bits. Memory is the limit: one read for the largest value, one to convert. The
// result is written as it is and, for the products of the backward pass, transposed.
//
// Two kernels. The first leaves the largest value of each block; in the second every block finds
// the largest of these, so no third kernel and no atomics are needed.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/vector.h"
#include "linear/fp8_cuda.h"
#include "linear/fp8_format.h"

namespace bert_unpad::cuda {
namespace {

constexpr const char* kOp = "quantize_fp8";
constexpr int kThreads = 256, kWarps = kThreads / 32;
// A partial for each thread of the second kernel.
constexpr int kMaxPartials = kThreads;
// Loads in flight of a thread of the first: 2 blocks of 256 threads keep 32 KiB in flight on an SM,
// where an H100 needs some 20 KiB to hide its memory's latency. Not measured.
constexpr int kInFlight = 4;
// A block takes tiles of 64 x 64 numbers, a thread 4 x 4 of them.
constexpr int kTile = 64, kGroups = kTile / 4;
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

template <class T, class Format>
BU_KERNEL(kThreads, 4)
fp8_quantize_kernel(BU_PARAMS QuantizeParams p, int64_t partials) {
  const bool has_partial = threadIdx.x < partials;
  const float largest =
      max_over_block(has_partial ? load_global<float>(p.partials + threadIdx.x) : 0.0f);
  const float scale = largest > 0.0f ? largest / Format::kLargest : 1.0f;
  if (blockIdx.x == 0 && threadIdx.x == 0) store_global(p.scale, scale);
  // Finite, so that zeros stay zeros beside the smallest of subnormal numbers.
  const float inverse = largest > 0.0f ? fminf(Format::kLargest / largest, FLT_MAX) : 1.0f;

  const int64_t padded_rows = fp8_padded(p.rows);
  const int64_t across = (p.columns + kTile - 1) / kTile;
  const int64_t tiles = across * ((padded_rows + kTile - 1) / kTile);
  const int row_group = threadIdx.x / kGroups, column_group = threadIdx.x % kGroups;
  const T* x = static_cast<const T*>(p.x);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first_row = tile / across * kTile, first_column = tile % across * kTile;
    const int64_t row = first_row + 4 * row_group, column = first_column + 4 * column_group;
    const bool inside = column < p.columns;
    Vector<T, 4> in[4] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r)
      if (inside && row + r < p.rows) in[r] = load_vector<T, 4>(x + (row + r) * p.columns + column);
    uint32_t words[4] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (!inside || row + r >= p.rows) continue;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        words[r] |= to_fp8<Format>(to_float(in[r].v[c]) * inverse) << (8 * c);
      store_global(p.q + (row + r) * p.columns + column, words[r]);
    }
    if (p.q_transposed == nullptr) continue;
    transpose_bytes(words);
    sync_block();  // the tile before has left shared memory
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c)
      store_shared(4 * ((4 * column_group + c) * kStride + row_group), words[c]);
    sync_block();
#pragma unroll
    for (uint32_t i = threadIdx.x; i < kTile * kGroups; i += kThreads) {
      const uint32_t c = i / kGroups, word = i % kGroups;
      const int64_t to_column = first_column + c, to_row = first_row + 4 * word;
      if (to_column < p.columns && to_row < padded_rows)
        store_global(p.q_transposed + to_column * padded_rows + to_row,
                     load_shared<uint32_t>(4 * (c * kStride + word)));
    }
  }
}

template <class T>
void run(const QuantizeParams& p, cudaStream_t stream) {
  const int64_t partials = quantize_partials(p);
  launch(kOp, fp8_largest_kernel<T>, dim3(partials), dim3(kThreads), kSharedBytes, stream, p);
  const int64_t tiles =
      (p.columns + kTile - 1) / kTile * ((fp8_padded(p.rows) + kTile - 1) / kTile);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, int64_t{4} * sm_count(kOp)));
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

}  // namespace bert_unpad::cuda
