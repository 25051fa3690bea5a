// Quantisation to 8 bits. Memory is the limit: one read for the largest value, one to convert. The
// result is written as it is and, for the products of the backward pass, transposed.
//
// Two kernels. The first leaves the largest value of each block; in the second every block finds
// the largest of these, so no third kernel and no atomics are needed. Lists of weights have kernels
// of their own, whose blocks take four tiles of one weight.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cuda/fp8_tile.h"
#include "cuda/launch.h"
#include "cuda/table.h"
#include "linear/fp8_cuda.h"

namespace bert_unpad::cuda {
namespace {

using namespace fp8;

constexpr const char *kOp = "quantize_fp8", *kWeightsOp = "quantize_weights_fp8_";
// A partial for each thread of the second kernel.
constexpr int kMaxPartials = kThreads;
// Loads in flight of a thread of the first: 2 blocks of 256 threads keep 32 KiB in flight on an SM,
// where an H100 needs some 20 KiB to hide its memory's latency. Not measured.
constexpr int kInFlight = 4;

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

template <class T, class Format>
BU_DEVICE void quantize_tile(const Fp8Matrix& m, int64_t tile, float inverse) {
  const Patch at(m, tile);
  Vector<T, 4> in[4];
  load_patch(m, at, m.x, in);
  store_tile<Format>(m, at, inverse, [&](int r, int c) { return to_float(in[r].v[c]); });
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
    const Fp8Matrix& m = p.table.entries[at.entry];
    Vector<float, 4> in[4];
    load_patch(m, Patch(m, tile), m.x, in);
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(in[i / 4].v[i % 4]));
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
