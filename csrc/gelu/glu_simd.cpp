// Gated linear units (Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202), forward
// and backward: one read of every operand and one write, and nothing kept between the two.
#include "gelu/activations_simd.h"
#include "gelu/glu.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

template <class T, class Activation>
void forward_rows(const GluCpuParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.width;
  const float* bias = p.bias;
  const T* x = static_cast<const T*>(p.x) + begin * 2 * n;
  T* y = static_cast<T*>(p.out) + begin * n;
  for (int64_t row = begin; row < end; ++row, x += 2 * n, y += n) {
    for_strips(n, [=](int64_t j, auto width) {
      const auto a = load_strip(x + j, width) + load_strip(bias + j, width);
      const auto gate = load_strip(x + n + j, width) + load_strip(bias + n + j, width);
      store_strip(y + j, Activation::value(a) * gate, width);
    });
  }
}

template <class T, class Activation>
void backward_rows(const GluCpuParams& p, int64_t begin, int64_t end, float* dbias) {
  const int64_t n = p.width;
  const float* bias = p.bias;
  const T* x = static_cast<const T*>(p.x) + begin * 2 * n;
  const T* dy = static_cast<const T*>(p.dy) + begin * n;
  T* dx = static_cast<T*>(p.out) + begin * 2 * n;
  if (dbias)
    for (int64_t j = 0; j < 2 * n; ++j) dbias[j] = 0.0f;
  for (int64_t row = begin; row < end; ++row, x += 2 * n, dy += n, dx += 2 * n) {
    for_strips(n, [=](int64_t j, auto width) {
      const auto a = load_strip(x + j, width) + load_strip(bias + j, width);
      const auto gate = load_strip(x + n + j, width) + load_strip(bias + n + j, width);
      const auto d = load_strip(dy + j, width);
      const auto da = d * gate * Activation::derivative(a);
      const auto dgate = d * Activation::value(a);
      store_strip(dx + j, da, width);
      store_strip(dx + n + j, dgate, width);
      if (dbias) {
        store_strip(dbias + j, load_strip(dbias + j, width) + da, width);
        store_strip(dbias + n + j, load_strip(dbias + n + j, width) + dgate, width);
      }
    });
  }
}

// f.template operator()<T, Activation>()
template <template <class> class Activation, class F>
void with_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<float, Activation<FullPrecision>>();
    case DType::kBFloat16:
      return f.template operator()<bf16, Activation<ShortPrecision>>();
    case DType::kFloat16:
      return f.template operator()<f16, Activation<ShortPrecision>>();
  }
}
template <class F>
void with_types(const GluCpuParams& p, const F& f) {
  switch (p.kind) {
    case GluKind::kGelu:
      return with_dtype<Exact>(p.dtype, f);
    case GluKind::kGeluTanh:
      return with_dtype<Tanh>(p.dtype, f);
    case GluKind::kSilu:
      return with_dtype<Silu>(p.dtype, f);
    case GluKind::kRelu:
      return with_dtype<Relu>(p.dtype, f);
  }
}

void forward(const GluCpuParams& p, int64_t begin, int64_t end) {
  with_types(p, [&]<class T, class Activation>() { forward_rows<T, Activation>(p, begin, end); });
}

void backward(const GluCpuParams& p, int64_t begin, int64_t end, float* dbias) {
  with_types(
      p, [&]<class T, class Activation>() { backward_rows<T, Activation>(p, begin, end, dbias); });
}

}  // namespace

extern const GluKernels glu_kernels = {forward, backward};

}  // namespace bert_unpad::BERT_UNPAD_ISA
