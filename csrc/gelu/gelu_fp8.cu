// gelu(x + bias) and its backward pass for 8-bit products. The scale comes from earlier values
// (delayed scaling), so that one pass reads the operands, and writes the result in 8 bits, as it is
// and transposed, beside the largest value, from which later scales come.
#include <algorithm>
#include <type_traits>

#include "cuda/column_sum.h"
#include "cuda/fp8_tile.h"
#include "cuda/launch.h"
#include "gelu/gelu_fp8_cuda.h"
#include "gelu/gelu_math.h"

namespace bert_unpad::cuda {
namespace {

using namespace fp8;

constexpr const char* kForward = "bias_gelu_fp8";
constexpr const char* kBackward = "bias_gelu_fp8_backward";
// Blocks on an SM, which leave 64 and 85 registers a thread. Each thread has 4 and 8 loads of 4
// numbers in flight.
constexpr int kForwardBlocks = 4, kBackwardBlocks = 3;

template <class T, bool kTanh, bool kGradient>
BU_KERNEL(kThreads, kGradient ? kBackwardBlocks : kForwardBlocks)
bias_gelu_fp8_kernel(BU_PARAMS GeluFp8Params p) {
  using Format = std::conditional_t<kGradient, E5M2, E4M3>;
  const float inverse = 1.0f / load_global<float>(p.scale);
  float largest = 0.0f;
  const int64_t tiles = tiles_of(p);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Patch at(p, tile);
    Vector<T, 4> in[4], grad[4];
    load_patch(p, at, p.x, in);
    if constexpr (kGradient) load_patch(p, at, p.dy, grad);
    float bias[4] = {}, out[4][4], sums[4] = {};
    if (p.bias != nullptr && at.column < p.columns) {
#pragma unroll
      for (int c = 0; c < 4; ++c) bias[c] = load_parameter(p.bias, p.bias_dtype, at.column + c);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float u = to_float(in[r].v[c]) + bias[c];
        float y = 0.0f;
        if constexpr (kGradient)
          y = to_float(grad[r].v[c]) * gelu_derivative<kTanh>(u);
        else
          y = gelu<kTanh>(u);
        if (!at.has(p, r)) y = 0.0f;
        largest = fmaxf(largest, fabsf(y));
        sums[c] += y;
        out[r][c] = nan_unless_finite(y);
      }
    }
    store_tile<Format>(p, at, inverse, [&](int r, int c) { return out[r][c]; });
    if constexpr (kGradient) {
      if (p.dbias != nullptr) store_sums(p, at, sums, p.partials, kSharedBytes);
    }
  }
  note_largest(p.largest, largest);
}

template <bool kGradient>
void run(const char* op, const GeluFp8Params& p, cudaStream_t stream) {
  const int64_t most = int64_t{kGradient ? kBackwardBlocks : kForwardBlocks} * sm_count(op);
  const auto blocks = static_cast<unsigned>(std::min({tiles_of(p), most, kFp8Largest}));
  dispatch(p.dtype, [&]<class T>() {
    const auto kernel = p.tanh ? bias_gelu_fp8_kernel<T, true, kGradient>
                               : bias_gelu_fp8_kernel<T, false, kGradient>;
    launch(op, kernel, dim3(blocks), dim3(kThreads), kSharedBytes + (kGradient ? kSumsBytes : 0),
           stream, p);
  });
}

}  // namespace

void bias_gelu_fp8(const GeluFp8Params& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return;
  run<false>(kForward, p, stream);
}

void bias_gelu_fp8_backward(const GeluFp8Params& p, cudaStream_t stream) {
  if (p.columns == 0) return;
  if (p.rows > 0) run<true>(kBackward, p, stream);
  if (p.dbias != nullptr)
    column_sum(kBackward, p.partials, DType::kFloat32, fp8_tile_rows(p), p.columns, p.dbias,
               p.bias_dtype, stream);
}

}  // namespace bert_unpad::cuda
