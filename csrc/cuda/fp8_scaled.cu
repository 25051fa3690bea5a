// One pass over the matrix: the scale is known, so it is read once. See cuda/fp8_tile.h.
#include "cuda/fp8_scaled.h"

#include <algorithm>

#include "cuda/fp8_tile.h"
#include "cuda/launch.h"

namespace bert_unpad::cuda {
namespace {

template <class T, class Format>
BU_KERNEL(fp8::kThreads, 4)
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
  }
  fp8::note_largest(p.largest, largest);
}

}  // namespace

void quantize_fp8_scaled(const char* op, const ScaledParams& p, cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>(std::min({fp8::tiles_of(p), int64_t{4} * sm_count(op), kFp8Largest}));
  dispatch(p.dtype, [&]<class T>() {
    const auto kernel = p.e5m2 ? fp8_scaled_kernel<T, E5M2> : fp8_scaled_kernel<T, E4M3>;
    launch(op, kernel, dim3(blocks), dim3(fp8::kThreads), fp8::kSharedBytes, stream, p);
  });
}

}  // namespace bert_unpad::cuda
