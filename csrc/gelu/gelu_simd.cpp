// gelu(x + bias), forward and backward, exact (erf) and tanh form.
#include "gelu/gelu.h"

#include "gelu/activations_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

// The bias and the sums are padded: they are read and written in whole vectors.
template <int N>
BU_INLINE Strip<N> add_padded(const Strip<N>& strip, const float* p) {
  return strip + load_strip(p, Whole<N>{});
}

template <class T, class Gelu>
void forward_rows(const GeluCpuParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.hidden;
  const T* x = static_cast<const T*>(p.x) + begin * n;
  const float* bias = p.bias;
  T* y = static_cast<T*>(p.out) + begin * n;
  for (int64_t row = begin; row < end; ++row, x += n, y += n) {
    for_strips(n, [=](int64_t j, auto width) {
      const auto v = add_padded(load_strip(x + j, width), bias + j);
      store_strip(y + j, Gelu::value(v), width);
    });
  }
}

template <class T, class Gelu>
void backward_rows(const GeluCpuParams& p, int64_t begin, int64_t end, float* dbias) {
  const int64_t n = p.hidden;
  const T* x = static_cast<const T*>(p.x) + begin * n;
  const T* dy = static_cast<const T*>(p.dy) + begin * n;
  const float* bias = p.bias;
  T* dx = static_cast<T*>(p.out) + begin * n;
  if (dbias) for_columns(n, [=](int64_t j, auto) { store(dbias + j, f32v{}); });
  for (int64_t row = begin; row < end; ++row, x += n, dy += n, dx += n) {
    for_strips(n, [=](int64_t j, auto width) {
      const auto v = add_padded(load_strip(x + j, width), bias + j);
      const auto g = load_strip(dy + j, width) * Gelu::derivative(v);
      store_strip(dx + j, g, width);
      if (dbias) store_whole(dbias + j, add_padded(g, dbias + j));
    });
  }
}

template <class T>
void forward_of(const GeluCpuParams& p, int64_t begin, int64_t end) {
  using Precision = PrecisionFor<T>::Type;
  (p.tanh ? forward_rows<T, Tanh<Precision>> : forward_rows<T, Exact<Precision>>)(p, begin, end);
}
template <class T>
void backward_of(const GeluCpuParams& p, int64_t begin, int64_t end, float* dbias) {
  using Precision = PrecisionFor<T>::Type;
  (p.tanh ? backward_rows<T, Tanh<Precision>> : backward_rows<T, Exact<Precision>>)(p, begin, end,
                                                                                    dbias);
}

void forward(const GeluCpuParams& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case DType::kFloat32:
      return forward_of<float>(p, begin, end);
    case DType::kBFloat16:
      return forward_of<bf16>(p, begin, end);
    case DType::kFloat16:
      return forward_of<f16>(p, begin, end);
  }
}

void backward(const GeluCpuParams& p, int64_t begin, int64_t end, float* dbias) {
  switch (p.dtype) {
    case DType::kFloat32:
      return backward_of<float>(p, begin, end, dbias);
    case DType::kBFloat16:
      return backward_of<bf16>(p, begin, end, dbias);
    case DType::kFloat16:
      return backward_of<f16>(p, begin, end, dbias);
  }
}

}  // namespace

extern const GeluKernels gelu_kernels = {forward, backward};

}  // namespace bert_unpad::BERT_UNPAD_ISA
