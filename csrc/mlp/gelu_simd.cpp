// gelu(x + bias), forward and backward, exact (erf) and tanh form.
//
// Both forms are computed as x times a sigmoid-like factor that keeps its relative accuracy for
// large negative x, where 1 + erf and 1 + tanh would cancel.
#include "mlp/gelu.h"

#include "cpu/strip_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

// Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016): x Phi(x), Phi the standard normal
// distribution function.
//
// Phi(-a) = exp(-a^2 / 2) R(a) for a >= 0, with R a polynomial in t = 1 / (1 + 0.3 a) without a
// constant term, the form of Abramowitz and Stegun 7.1.26 with 8 terms in place of 5. The
// coefficients are the weighted least squares fit to erfc(a / sqrt 2) exp(a^2 / 2) / 2 on [0, 14]
// that Lawson's algorithm makes minimax: relative error 1.5e-7 everywhere. The exponential serves
// the density of the backward pass as well.
struct Exact {
  template <class V>
  struct Normal {
    V cdf, exponential;  // exp(-x^2 / 2)
  };
  template <class V>
  BU_INLINE static Normal<V> normal(const V& x) {
    const V a =
        lockstep([](f32v v) { return vmin(as_f32(as_u32(v) & 0x7fffffffu), splat(20.0f)); }, x);
    const V e = exp2v(a * a * -0.72134752f);
    const V t = 1.0f / (a * 0.3f + 1.0f);
    V r = t * 0.035674546f - 0.15720207f;
    r = r * t + 0.20635167f;
    r = r * t - 0.053681867f;
    r = r * t + 0.12856065f;
    r = r * t + 0.099913799f;
    r = r * t + 0.12075391f;
    r = r * t + 0.11962930f;
    const V tail = r * t * e;
    const auto side = [](f32v v, f32v tail) { return select(v < 0.0f, tail, 1.0f - tail); };
    return {lockstep(side, x, tail), e};
  }
  template <class V>
  BU_INLINE static V value(const V& x) {
    return x * normal(x).cdf;
  }
  template <class V>
  BU_INLINE static V derivative(const V& x) {
    const Normal<V> n = normal(x);
    return n.cdf + x * n.exponential * 0.39894228f;
  }
};

// The same paper's approximation x / 2 (1 + tanh(u)) = x / (1 + exp(-2 u)),
// u = sqrt(2 / pi) (x + 0.044715 x^3).
struct Tanh {
  template <class V>
  struct Sigmoid {
    V value, complement;  // neither cancels
  };
  template <class V>
  BU_INLINE static Sigmoid<V> sigmoid(const V& x) {
    const V v = x * (x * x * 0.044715f + 1.0f) * -2.30220820f;  // -2 sqrt(2 / pi) log2(e)
    const V e = exp2v(lockstep([](f32v u) { return vmin(u, splat(126.0f)); }, v));
    const V s = 1.0f / (e + 1.0f);
    return {s, e * s};
  }
  template <class V>
  BU_INLINE static V value(const V& x) {
    return x * sigmoid(x).value;
  }
  template <class V>
  BU_INLINE static V derivative(const V& x) {
    const Sigmoid<V> s = sigmoid(x);
    const V slope = x * x * 0.21406944f + 1.5957691f;  // 2 du/dx
    return s.value + x * s.value * s.complement * slope;
  }
};

// The bias and the sums are padded: they are read and written in whole vectors.
template <int N>
BU_INLINE Strip<N> add_padded(const Strip<N>& strip, const float* p) {
  return strip + load_strip(p, Whole<N>{});
}

template <class T, class Gelu>
void forward_rows(const GeluParams& p, int64_t begin, int64_t end) {
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
void backward_rows(const GeluParams& p, int64_t begin, int64_t end, float* dbias) {
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
void forward_of(const GeluParams& p, int64_t begin, int64_t end) {
  (p.tanh ? forward_rows<T, Tanh> : forward_rows<T, Exact>)(p, begin, end);
}
template <class T>
void backward_of(const GeluParams& p, int64_t begin, int64_t end, float* dbias) {
  (p.tanh ? backward_rows<T, Tanh> : backward_rows<T, Exact>)(p, begin, end, dbias);
}

void forward(const GeluParams& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case DType::kFloat32:
      return forward_of<float>(p, begin, end);
    case DType::kBFloat16:
      return forward_of<bf16>(p, begin, end);
    case DType::kFloat16:
      return forward_of<f16>(p, begin, end);
  }
}

void backward(const GeluParams& p, int64_t begin, int64_t end, float* dbias) {
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
