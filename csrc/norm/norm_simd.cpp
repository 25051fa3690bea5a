// LN(residual + dropout(x + x_bias)), forward and backward, a run of rows at a time; LN is
// LayerNorm or RMSNorm.
//
// The forward pass reads its inputs once and writes y only. The backward pass makes the norm's
// input again from x, residual and the recomputed mask, rather than reading a stored copy: the same
// memory traffic for half of the writes, and no rounding of that input to 16 bits. A sum that is a
// result itself is such a copy: then it is what is normalised, and what the backward pass reads.
#include "cpu/norm_row_simd.h"
#include "cpu/strip_simd.h"
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

// `words`: null without dropout.
template <class T>
Inputs<T> row_inputs(const NormCpuParams& p, int64_t row, const uint16_t* words) {
  const auto* residual = static_cast<const T*>(p.residual);
  return {static_cast<const T*>(p.x) + row * p.hidden,
          residual ? residual + row * p.hidden : nullptr,
          p.x_bias,
          words,
          p.keep_threshold,
          keep_scale(p.keep_threshold)};
}

// The dropout words of a row, in `space`; null without dropout.
const uint16_t* dropout_words(const NormCpuParams& p, int64_t row, float* space) {
  if (p.keep_threshold >= 65536u) return nullptr;
  auto* words = reinterpret_cast<uint16_t*>(space);
  row_words(p.rng, p.keep_threshold, static_cast<uint32_t>(row), p.hidden, words);
  return words;
}

// Row `row` of an optional operand or result.
template <class T>
T* row_of(T* base, int64_t row, int64_t hidden) {
  return base ? base + row * hidden : nullptr;
}

// What is left of v once it is stored as a T.
BU_INLINE f32v rounded(f32v v, const float*) { return v; }
BU_INLINE f32v rounded(f32v v, const bf16*) { return widen_bf16(narrow_bf16(v)); }
BU_INLINE f32v rounded(f32v v, const f16*) { return widen_f16(narrow_f16(v)); }

template <class T>
void forward_rows(const NormCpuParams& p, int64_t begin, int64_t end, float* scratch) {
  float* z = scratch;
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* words = dropout_words(p, row, scratch + 2 * p.padded);
    const Inputs<T> inputs = row_inputs<T>(p, row, words);
    T* sum = row_of(static_cast<T*>(p.sum), row, p.hidden);
    f32v total = {};
    for_columns(p.hidden, [&](int64_t j, auto width) {
      f32v v = inputs(j, width);
      if (sum) {
        store(sum + j, v, width);
        v = rounded(v, sum);
      }
      store(z + j, v);
      total += first(v, width);
    });
    const float mean = p.mean ? reduce_add(total) / static_cast<float>(p.hidden) : 0.0f;
    const float rstd = row_rstd(z, p.hidden, mean, p.eps);
    if (p.mean) p.mean[row] = mean;
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
  float *dweight = sums, *dbias = sums + p.padded, *dx_bias = sums + 2 * p.padded;
  for (int64_t j = 0; j < 3 * p.padded; ++j) sums[j] = 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* words = dropout_words(p, row, scratch + 2 * p.padded);
    const Inputs<T> inputs = row_inputs<T>(p, row, words);
    const T* dy = static_cast<const T*>(p.dy) + row * p.hidden;
    const float mean = p.mean ? p.mean[row] : 0.0f, rstd = p.rstd[row];
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
    const float a = p.mean ? reduce_add(sum_g) * scale : 0.0f, b = reduce_add(sum_gx) * scale;
    T* dx = static_cast<T*>(p.dx) + row * p.hidden;
    T* dresidual = row_of(static_cast<T*>(p.dresidual), row, p.hidden);
    for_columns(p.hidden, [&](int64_t j, auto width) {
      f32v dz = load(g + j) * rstd - (load(xhat + j) * b + a);
      if (dresidual) store(dresidual + j, dz, width);
      if (words) dz = keep(dz * inputs.scale, words + j, p.keep_threshold);
      store(dx + j, dz, width);
      store(dx_bias + j, load(dx_bias + j) + dz);
    });
  }
}

// Adds the vectors of a strip to as many sums, so that none waits for the one before.
struct StripSum {
  f32v parts[kStripVectors] = {};

  template <int N>
  BU_INLINE void operator+=(const Strip<N>& strip) {
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) parts[i] += strip.v[i];
  }
  BU_INLINE float total() const {
    f32v sum = parts[0];
    for (int i = 1; i < kStripVectors; ++i) sum += parts[i];
    return reduce_add(sum);
  }
};

template <int N>
BU_INLINE Strip<N> inside(const Strip<N>& strip, Whole<N>) {
  return strip;
}
BU_INLINE Strip<1> inside(const Strip<1>& strip, Tail tail) { return {{first(strip.v[0], tail)}}; }

// Parameters and sums are padded.
template <int N>
BU_INLINE Strip<N> load_padded(const float* p, const Strip<N>&) {
  return load_strip(p, Whole<N>{});
}

// Where the norm's input is x: read again from the cache instead of kept in scratch memory.
template <class T>
void forward_plain_rows(const NormCpuParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.hidden;
  const float* weight = p.weight;
  const float* bias = p.bias;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * n;
    T* y = static_cast<T*>(p.y) + row * n;
    float mean = 0.0f;
    if (p.mean) {
      StripSum sum;
      for_strips(n, [&](int64_t j, auto width) { sum += load_strip(x + j, width); });
      p.mean[row] = mean = sum.total() / static_cast<float>(n);
    }
    StripSum squares;
    for_strips(n, [&](int64_t j, auto width) {
      const auto centred = inside(load_strip(x + j, width) - mean, width);
      squares += centred * centred;
    });
    const float rstd = 1.0f / __builtin_sqrtf(squares.total() / static_cast<float>(n) + p.eps);
    p.rstd[row] = rstd;
    for_strips(n, [=](int64_t j, auto width) {
      const auto xhat = (load_strip(x + j, width) - mean) * rstd;
#pragma GCC unroll 4
      for (size_t i = 0; i < sizeof(xhat) / sizeof(f32v); ++i)
        __builtin_prefetch(x + n + j + i * kLanes);  // the next row: 1.2x
      store_strip(y + j, xhat * load_padded(weight + j, xhat) + load_padded(bias + j, xhat), width);
    });
  }
}

template <class T>
void backward_plain_rows(const NormCpuParams& p, int64_t begin, int64_t end, float* scratch,
                         float* sums) {
  const int64_t n = p.hidden;
  const float* weight = p.weight;
  float *dweight = sums, *dbias = sums + p.padded;
  float* dx_bias = p.x_bias_gradient ? sums + 2 * p.padded : nullptr;
  for (int64_t j = 0; j < (dx_bias ? 3 : 2) * p.padded; ++j) sums[j] = 0.0f;
  const float keep_factor = keep_scale(p.keep_threshold);
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* words = dropout_words(p, row, scratch);
    const T* x = static_cast<const T*>(p.x) + row * n;
    const T* dy = static_cast<const T*>(p.dy) + row * n;
    const T* dsum = row_of(static_cast<const T*>(p.dsum), row, n);
    const float mean = p.mean ? p.mean[row] : 0.0f, rstd = p.rstd[row];
    StripSum sum_g, sum_gx;
    for_strips(n, [&](int64_t j, auto width) {
      const auto xhat = (load_strip(x + j, width) - mean) * rstd;
      const auto d = load_strip(dy + j, width), g = d * load_padded(weight + j, d);
      sum_g += g;
      sum_gx += g * xhat;
      store_whole(dweight + j, load_padded(dweight + j, d) + d * xhat);
      store_whole(dbias + j, load_padded(dbias + j, d) + d);
    });
    const float scale = rstd / static_cast<float>(n);
    const float a = p.mean ? sum_g.total() * scale : 0.0f, b = sum_gx.total() * scale;
    T* dx = static_cast<T*>(p.dx) + row * n;
    T* dresidual = row_of(static_cast<T*>(p.dresidual), row, n);
    for_columns(n, [&](int64_t j, auto width) {
      const f32v xhat = (load(x + j, width) - mean) * rstd;
      f32v dz = load(dy + j, width) * load(weight + j) * rstd - (xhat * b + a);
      if (dsum) dz += load(dsum + j, width);
      if (dresidual) store(dresidual + j, dz, width);
      if (words) dz = keep(dz * keep_factor, words + j, p.keep_threshold);
      store(dx + j, dz, width);
      if (dx_bias) store(dx_bias + j, load(dx_bias + j) + dz);
    });
  }
}

template <class T>
void forward_of(const NormCpuParams& p, int64_t begin, int64_t end, float* scratch) {
  p.plain ? forward_plain_rows<T>(p, begin, end) : forward_rows<T>(p, begin, end, scratch);
}
template <class T>
void backward_of(const NormCpuParams& p, int64_t begin, int64_t end, float* scratch, float* sums) {
  (p.plain ? backward_plain_rows<T> : backward_rows<T>)(p, begin, end, scratch, sums);
}

void forward(const NormCpuParams& p, int64_t begin, int64_t end, float* scratch) {
  switch (p.dtype) {
    case DType::kFloat32:
      return forward_of<float>(p, begin, end, scratch);
    case DType::kBFloat16:
      return forward_of<bf16>(p, begin, end, scratch);
    case DType::kFloat16:
      return forward_of<f16>(p, begin, end, scratch);
  }
}

void backward(const NormCpuParams& p, int64_t begin, int64_t end, float* scratch, float* sums) {
  switch (p.dtype) {
    case DType::kFloat32:
      return backward_of<float>(p, begin, end, scratch, sums);
    case DType::kBFloat16:
      return backward_of<bf16>(p, begin, end, scratch, sums);
    case DType::kFloat16:
      return backward_of<f16>(p, begin, end, scratch, sums);
  }
}

}  // namespace

extern const NormKernels norm_kernels = {forward, backward};

}  // namespace bert_unpad::BERT_UNPAD_ISA
