// LN(residual + dropout(x + x_bias)), forward and backward, a run of rows at a time.
//
// The forward pass reads its inputs once and writes y only. The backward pass makes the LayerNorm's
// input again from x, residual and the recomputed mask, rather than reading a stored copy: the same
// memory traffic for half of the writes, and no rounding of that input to 16 bits.
#include "cpu/norm_row_simd.h"
#include "norm/norm.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

// What is constant over the rows, in a shape that compilers keep in registers.
template <class T>
struct Inputs {
  const T *x, *residual;
  const float* x_bias;
  const uint16_t* words;
  uint32_t threshold;
  float scale;

  template <class Width>
  BU_INLINE f32v operator()(int64_t j, Width width) const {
    f32v v = load(x + j, width) + load(x_bias + j);
    if (words) v = keep(v * scale, words + j, threshold);
    if (residual) v += load(residual + j, width);
    return v;
  }
  // Asks for column j of the next row: the hardware's prefetchers stop at the end of a page, which
  // a row or two fill.
  BU_INLINE void prefetch_next(int64_t j, int64_t columns) const {
    __builtin_prefetch(x + columns + j);
    if (residual) __builtin_prefetch(residual + columns + j);
  }
};

template <class T>
Inputs<T> row_inputs(const NormCpuParams& p, int64_t row, uint16_t* words) {
  const bool dropout = p.keep_threshold < 65536u;
  if (dropout) row_words(p.rng, static_cast<uint32_t>(row), p.hidden, words);
  const auto* residual = static_cast<const T*>(p.residual);
  return {static_cast<const T*>(p.x) + row * p.hidden,
          residual ? residual + row * p.hidden : nullptr,
          p.x_bias,
          dropout ? words : nullptr,
          p.keep_threshold,
          keep_scale(p.keep_threshold)};
}

template <class T>
void forward_rows(const NormCpuParams& p, int64_t begin, int64_t end, float* scratch) {
  float* z = scratch;
  auto* words = reinterpret_cast<uint16_t*>(scratch + 2 * p.padded);
  for (int64_t row = begin; row < end; ++row) {
    const Inputs<T> inputs = row_inputs<T>(p, row, words);
    f32v total = {};
    for_columns(p.hidden, [&](int64_t j, auto width) {
      const f32v v = inputs(j, width);
      store(z + j, v);
      total += first(v, width);
    });
    float mean, rstd;
    row_statistics(z, p.hidden, total, p.eps, mean, rstd);
    p.mean[row] = mean;
    p.rstd[row] = rstd;
    T* y = static_cast<T*>(p.y) + row * p.hidden;
    for_columns(p.hidden, [&](int64_t j, auto width) {
      inputs.prefetch_next(j, p.hidden);  // 1.1x; in the backward pass it is slower
      store(y + j, (load(z + j) - mean) * rstd * load(p.weight + j) + load(p.bias + j), width);
    });
  }
}

template <class T>
void backward_rows(const NormCpuParams& p, int64_t begin, int64_t end, float* scratch,
                   float* sums) {
  float *xhat = scratch, *g = scratch + p.padded;
  auto* words = reinterpret_cast<uint16_t*>(scratch + 2 * p.padded);
  float *dweight = sums, *dbias = sums + p.padded, *dx_bias = sums + 2 * p.padded;
  for (int64_t j = 0; j < 3 * p.padded; ++j) sums[j] = 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    const Inputs<T> inputs = row_inputs<T>(p, row, words);
    const T* dy = static_cast<const T*>(p.dy) + row * p.hidden;
    const float mean = p.mean[row], rstd = p.rstd[row];
    f32v sum_g = {}, sum_gx = {};
    // Beyond the last column dy reads as zero, so nothing there counts.
    for_columns(p.hidden, [&](int64_t j, auto width) {
      const f32v x = (inputs(j, width) - mean) * rstd, d = load(dy + j, width);
      const f32v weighted = d * load(p.weight + j);
      store(xhat + j, x);
      store(g + j, weighted);
      sum_g += weighted;
      sum_gx += weighted * x;
      store(dweight + j, load(dweight + j) + d * x);
      store(dbias + j, load(dbias + j) + d);
    });
    const float scale = rstd / static_cast<float>(p.hidden);
    const float a = reduce_add(sum_g) * scale, b = reduce_add(sum_gx) * scale;
    T* dx = static_cast<T*>(p.dx) + row * p.hidden;
    T* dresidual = p.dresidual ? static_cast<T*>(p.dresidual) + row * p.hidden : nullptr;
    for_columns(p.hidden, [&](int64_t j, auto width) {
      f32v dz = load(g + j) * rstd - (load(xhat + j) * b + a);
      if (dresidual) store(dresidual + j, dz, width);
      if (inputs.words) dz = keep(dz * inputs.scale, words + j, p.keep_threshold);
      store(dx + j, dz, width);
      store(dx_bias + j, load(dx_bias + j) + dz);
    });
  }
}

void forward(const NormCpuParams& p, int64_t begin, int64_t end, float* scratch) {
  switch (p.dtype) {
    case DType::kFloat32:
      return forward_rows<float>(p, begin, end, scratch);
    case DType::kBFloat16:
      return forward_rows<bf16>(p, begin, end, scratch);
    case DType::kFloat16:
      return forward_rows<f16>(p, begin, end, scratch);
  }
}

void backward(const NormCpuParams& p, int64_t begin, int64_t end, float* scratch, float* sums) {
  switch (p.dtype) {
    case DType::kFloat32:
      return backward_rows<float>(p, begin, end, scratch, sums);
    case DType::kBFloat16:
      return backward_rows<bf16>(p, begin, end, scratch, sums);
    case DType::kFloat16:
      return backward_rows<f16>(p, begin, end, scratch, sums);
  }
}

}  // namespace

extern const NormKernels norm_kernels = {forward, backward};

}  // namespace bert_unpad::BERT_UNPAD_ISA
