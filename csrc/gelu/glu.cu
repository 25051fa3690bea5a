// Gated linear units (Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202) and
// their backward pass, limited by memory: one read of every operand, 16 bytes at a time, and one
// write.
//
// As in gelu.cu a thread keeps its columns, of both halves, and walks down the rows; the backward
// pass computes both halves' gradients from one activation, of which nothing was kept.
#include "cuda/vector.h"
#include "gelu/bias_gradient.h"
#include "gelu/column_grid.h"
#include "gelu/gelu_math.h"
#include "gelu/glu_cuda.h"

namespace bert_unpad::cuda {
namespace {

constexpr const char* kForward = "glu";
constexpr const char* kBackward = "glu_backward";

// Blocks on an SM, and rows that a thread has in flight. Not measured: with a 16-byte vector of
// every operand they keep 48 and 30 KiB of loads in flight on an SM.
constexpr int kForwardBlocks = 6, kBackwardBlocks = 5;
constexpr int kForwardRows = 2;

// A thread's columns of the two halves.
template <int N>
struct Halves {
  float value[N], gate[N];
};

template <int N>
BU_DEVICE void load_bias(const GluCudaParams& p, int64_t column, Halves<N>& bias) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const bool none = p.bias == nullptr;
    bias.value[i] = none ? 0.0f : load_parameter(p.bias, p.bias_dtype, column + i);
    bias.gate[i] = none ? 0.0f : load_parameter(p.bias, p.bias_dtype, p.width + column + i);
  }
}

template <class T, int N, GluKind kKind>
BU_KERNEL(ColumnGrid::kThreads, kForwardBlocks)
glu_kernel(BU_PARAMS GluCudaParams p) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (column >= p.width) return;
  Halves<N> bias;
  load_bias(p, column, bias);
  const T* x = static_cast<const T*>(p.x) + column;
  T* y = static_cast<T*>(p.y) + column;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  for (; row < p.rows; row += step * kForwardRows) {
    Vector<T, N> value[kForwardRows], gate[kForwardRows];
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r) {
      if (row + r * step < p.rows) {
        value[r] = load_vector<T, N>(x + (row + r * step) * 2 * p.width);
        gate[r] = load_vector<T, N>(x + ((row + r * step) * 2 + 1) * p.width);
      }
    }
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r) {
      if (row + r * step >= p.rows) break;
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i)
        out[i] = activation<kKind>(to_float(value[r].v[i]) + bias.value[i]).value *
                 (to_float(gate[r].v[i]) + bias.gate[i]);
      store_vector<T, N>(y + (row + r * step) * p.width, out);
    }
  }
}

template <class T, int N, GluKind kKind>
BU_KERNEL(ColumnGrid::kThreads, kBackwardBlocks)
glu_backward_kernel(BU_PARAMS GluCudaParams p) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const bool inside = column < p.width;
  float sum[2][N] = {};  // of both halves
  if (inside) {
    Halves<N> bias;
    load_bias(p, column, bias);
    const T* x = static_cast<const T*>(p.x) + column;
    const T* dy = static_cast<const T*>(p.dy) + column;
    T* dx = static_cast<T*>(p.dx) + column;
    const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
    int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
    for (; row < p.rows; row += step) {
      const auto value = load_vector<T, N>(x + row * 2 * p.width);
      const auto gate = load_vector<T, N>(x + (row * 2 + 1) * p.width);
      const auto grad = load_vector<T, N>(dy + row * p.width);
      Halves<N> out;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const auto [act, slope] = activation<kKind>(to_float(value.v[i]) + bias.value[i]);
        const float d = to_float(grad.v[i]);
        out.value[i] = d * (to_float(gate.v[i]) + bias.gate[i]) * slope;
        out.gate[i] = d * act;
        sum[0][i] += out.value[i];
        sum[1][i] += out.gate[i];
      }
      store_vector<T, N>(dx + row * 2 * p.width, out.value);
      store_vector<T, N>(dx + (row * 2 + 1) * p.width, out.gate);
    }
  }
  if (p.dbias != nullptr) finish_bias_gradient(p, p.width, sum);
}

// f.operator()<kind>()
template <class F>
void dispatch_kind(GluKind kind, const F& f) {
  switch (kind) {
    case GluKind::kGelu:
      return f.template operator()<GluKind::kGelu>();
    case GluKind::kGeluTanh:
      return f.template operator()<GluKind::kGeluTanh>();
    case GluKind::kSilu:
      return f.template operator()<GluKind::kSilu>();
    case GluKind::kRelu:
      return f.template operator()<GluKind::kRelu>();
  }
}

// f.operator()<T, elements per thread, kind>()
template <class F>
void dispatch_kernel(const GluCudaParams& p, const F& f) {
  const bool vectors = vector_width(p, p.width) > 1;
  dispatch(p.dtype, [&]<class T>() {
    dispatch_kind(p.kind, [&]<GluKind kKind>() {
      vectors ? f.template operator()<T, kVectorWidth<T>, kKind>()
              : f.template operator()<T, 1, kKind>();
    });
  });
}

}  // namespace

void glu(const GluCudaParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return;
  const ColumnGrid g = column_grid(p, p.width, kForward, kForwardBlocks);
  dispatch_kernel(p, [&]<class T, int N, GluKind kKind>() {
    launch(kForward, glu_kernel<T, N, kKind>, g.grid, g.block, 0, stream, p);
  });
}

ColumnScratch glu_scratch(const GluCudaParams& p) {
  return bias_gradient_scratch(p, p.width, kBackward, kBackwardBlocks);
}

void glu_backward(const GluCudaParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0)
    return zero_columns(kBackward, p.dbias, p.bias_dtype, 2 * p.width, stream);
  const ColumnGrid g = backward_grid(p, p.width, kBackward, kBackwardBlocks);
  dispatch_kernel(p, [&]<class T, int N, GluKind kKind>() {
    launch(kBackward, glu_backward_kernel<T, N, kKind>, g.grid, g.block,
           bias_gradient_shared_bytes<N, 2>(), stream, p);
  });
}

}  // namespace bert_unpad::cuda
