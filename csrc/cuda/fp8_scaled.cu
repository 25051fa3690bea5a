// One pass over the matrix: the scale is known, so it is read once. See cuda/fp8_tile.h.
#include "cuda/fp8_scaled.h"

#include <algorithm>

#include "cuda/column_sum.h"
#include "cuda/fp8_tile.h"
#include "cuda/launch.h"

namespace bert_unpad::cuda {
namespace {

// On an SM, which leave 40 and with sums 48 registers a thread, with 4 loads of 4 numbers in
// flight.
template <bool kSums>
constexpr int kScaledBlocks = kSums ? 5 : 6;

template <class T, class Format, bool kSums>
BU_KERNEL(fp8::kThreads, kScaledBlocks<kSums>)
fp8_scaled_kernel(BU_PARAMS ScaledParams p) {
  const float inverse = 1.0f / load_global<float>(p.scale);
  float largest = 0.0f;
  const int64_t tiles = fp8::tiles_of(p);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const fp8::Patch at(p, tile);
    Vector<T, 4> in[4];
    fp8::load_patch(p, at, p.x, in);
    fp8::store_tile<Format>(p, at, inverse, [&](int r, int c) {
      const float x = to_float(in[r].v[c]);
      largest = fmaxf(largest, fabsf(x));
      return fp8::nan_unless_finite(x);
    });
    if constexpr (kSums) {
      float sums[4] = {};
#pragma unroll
      for (int i = 0; i < 16; ++i) sums[i % 4] += to_float(in[i / 4].v[i % 4]);
      fp8::store_sums(p, at, sums, p.partials, fp8::kSharedBytes);
    }
  }
  fp8::note_largest(p.largest, largest);
}

}  // namespace

void quantize_fp8_scaled(const char* op, const ScaledParams& p, cudaStream_t stream) {
  if (p.columns == 0) return;
  if (p.rows > 0) {
    dispatch(p.dtype, [&]<class T>() {
      const auto run = [&]<bool kSums>() {
        const auto kernel =
            p.e5m2 ? fp8_scaled_kernel<T, E5M2, kSums> : fp8_scaled_kernel<T, E4M3, kSums>;
        const int64_t resident = int64_t{kScaledBlocks<kSums>} * sm_count(op);
        const auto blocks =
            static_cast<unsigned>(std::min({fp8::tiles_of(p), resident, kFp8Largest}));
        launch(op, kernel, dim3(blocks), dim3(fp8::kThreads),
               fp8::kSharedBytes + (kSums ? fp8::kSumsBytes : 0), stream, p);
      };
      p.sums != nullptr ? run.template operator()<true>() : run.template operator()<false>();
    });
  }
  if (p.sums != nullptr)
    column_sum(op, p.partials, DType::kFloat32, fp8_tile_rows(p), p.columns, p.sums,
               DType::kFloat32, stream);
}

}  // namespace bert_unpad::cuda
