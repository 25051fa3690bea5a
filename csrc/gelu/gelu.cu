// gelu(x + bias) and its backward pass, limited by memory: one read of every operand, 16 bytes at a
// time, and one write.
//
// A thread keeps its columns and walks down the rows, so the bias stays in registers and its
// gradient is summed in registers: first over a thread's rows, then over the block, then over the
// blocks by the last of them. The backward pass recomputes x + bias instead of storing it.
#include "cuda/vector.h"
#include "gelu/bias_gradient.h"
#include "gelu/column_grid.h"
#include "gelu/gelu_cuda.h"
#include "gelu/gelu_math.h"

namespace bert_unpad::cuda {
namespace {

constexpr const char* kForward = "bias_gelu";
constexpr const char* kBackward = "bias_gelu_backward";

// Blocks on an SM: enough to fill the device; 8 in the backward pass leave 64 registers a thread,
// which spills in bf16 on sm_90a.
constexpr int kForwardBlocks = 8, kBackwardBlocks = 6;
// Rows that a thread has in flight. Not measured: they keep about 64 and 48 KiB of loads in flight
// on an SM, where an H100 needs some 20 KiB to hide its memory's latency.
constexpr int kForwardRows = 4, kBackwardRows = 2;

template <int N>
BU_DEVICE void load_bias(const GeluCudaParams& p, int64_t column, float (&bias)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    bias[i] = p.bias == nullptr ? 0.0f : load_parameter(p.bias, p.bias_dtype, column + i);
}

template <class T, int N, bool kTanh>
BU_KERNEL(ColumnGrid::kThreads, kForwardBlocks)
bias_gelu_kernel(BU_PARAMS GeluCudaParams p) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (column >= p.columns) return;
  float bias[N];
  load_bias(p, column, bias);
  const T* x = static_cast<const T*>(p.x) + column;
  T* y = static_cast<T*>(p.y) + column;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  for (; row < p.rows; row += step * kForwardRows) {
    Vector<T, N> in[kForwardRows];
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r)
      if (row + r * step < p.rows) in[r] = load_vector<T, N>(x + (row + r * step) * p.columns);
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r) {
      if (row + r * step >= p.rows) break;
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = gelu<kTanh>(to_float(in[r].v[i]) + bias[i]);
      store_vector<T, N>(y + (row + r * step) * p.columns, out);
    }
  }
}

template <class T, int N, bool kTanh>
BU_KERNEL(ColumnGrid::kThreads, kBackwardBlocks)
bias_gelu_backward_kernel(BU_PARAMS GeluCudaParams p) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const bool inside = column < p.columns;
  float sum[1][N] = {};
  if (inside) {
    float bias[N];
    load_bias(p, column, bias);
    const T* x = static_cast<const T*>(p.x) + column;
    const T* dy = static_cast<const T*>(p.dy) + column;
    T* dx = static_cast<T*>(p.dx) + column;
    const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
    int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
    for (; row < p.rows; row += step * kBackwardRows) {
      Vector<T, N> in[kBackwardRows], grad[kBackwardRows];
#pragma unroll
      for (int r = 0; r < kBackwardRows; ++r) {
        if (row + r * step < p.rows) {
          in[r] = load_vector<T, N>(x + (row + r * step) * p.columns);
          grad[r] = load_vector<T, N>(dy + (row + r * step) * p.columns);
        }
      }
#pragma unroll
      for (int r = 0; r < kBackwardRows; ++r) {
        if (row + r * step >= p.rows) break;
        float out[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          out[i] = to_float(grad[r].v[i]) * gelu_derivative<kTanh>(to_float(in[r].v[i]) + bias[i]);
          sum[0][i] += out[i];
        }
        store_vector<T, N>(dx + (row + r * step) * p.columns, out);
      }
    }
  }
  if (p.dbias != nullptr) finish_bias_gradient(p, p.columns, sum);
}

// f.operator()<T, elements per thread, tanh>()
template <class F>
void dispatch_kernel(const GeluCudaParams& p, const F& f) {
  const bool vectors = vector_width(p, p.columns) > 1;
  dispatch(p.dtype, [&]<class T>() {
    if (vectors)
      p.tanh ? f.template operator()<T, kVectorWidth<T>, true>()
             : f.template operator()<T, kVectorWidth<T>, false>();
    else
      p.tanh ? f.template operator()<T, 1, true>() : f.template operator()<T, 1, false>();
  });
}

}  // namespace

void bias_gelu(const GeluCudaParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return;
  const ColumnGrid g = column_grid(p, p.columns, kForward, kForwardBlocks);
  dispatch_kernel(p, [&]<class T, int N, bool kTanh>() {
    launch(kForward, bias_gelu_kernel<T, N, kTanh>, g.grid, g.block, 0, stream, p);
  });
}

ColumnScratch bias_gelu_scratch(const GeluCudaParams& p) {
  return bias_gradient_scratch(p, p.columns, kBackward, kBackwardBlocks);
}

void bias_gelu_backward(const GeluCudaParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0)
    return zero_columns(kBackward, p.dbias, p.bias_dtype, p.columns, stream);
  const ColumnGrid g = backward_grid(p, p.columns, kBackward, kBackwardBlocks);
  dispatch_kernel(p, [&]<class T, int N, bool kTanh>() {
    launch(kBackward, bias_gelu_backward_kernel<T, N, kTanh>, g.grid, g.block,
           bias_gradient_shared_bytes<N, 1>(), stream, p);
  });
}

}  // namespace bert_unpad::cuda
