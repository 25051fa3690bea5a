// The two passes over a gradient bucket: sum of squares, scaling with a cast.
//
// Both are limited by memory. Four accumulators hide the latency of the additions, and shorten the
// chains in which rounding errors grow.
#include "clip/clip.h"
#include "cpu/strip_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

template <class T, bool kResidual, class Width>
BU_INLINE auto load_sum(const T* bucket, const float* residual, Width width) {
  const auto strip = load_strip(bucket, width);
  if constexpr (kResidual)
    return strip + load_strip(residual, width);
  else
    return strip;
}

template <class T, bool kResidual>
float sum_squares_of(const ClipCpuParams& p, int64_t begin, int64_t end) {
  const T* bucket = static_cast<const T*>(p.bucket) + begin;
  const float* residual = kResidual ? p.residual + begin : nullptr;
  const int64_t n = end - begin;
  constexpr int kStep = kStripVectors * kLanes;
  Strip<kStripVectors> wide{};
  int64_t j = 0;
  for (; j + kStep <= n; j += kStep) {
    const auto u = load_sum<T, kResidual>(bucket + j, residual + j, Whole<kStripVectors>{});
    wide = wide + u * u;
  }
  f32v sum{};
  for (; j + kLanes <= n; j += kLanes) {
    const f32v u = load_sum<T, kResidual>(bucket + j, residual + j, Whole<1>{}).v[0];
    sum += u * u;
  }
  if (j < n) {
    const Tail tail{static_cast<int>(n - j)};
    const f32v u = load_sum<T, kResidual>(bucket + j, residual + j, tail).v[0];
    sum += u * u;
  }
  for (int i = 0; i < kStripVectors; ++i) sum += wide.v[i];
  return reduce_add(sum);
}

// What a storage type keeps of v.
BU_INLINE f32v rounded(f32v v, bf16) { return widen_bf16(narrow_bf16(v)); }
BU_INLINE f32v rounded(f32v v, f16) { return widen_f16(narrow_f16(v)); }

// A number too large for the storage type is lost for good: its difference is infinite.
BU_INLINE f32v finite_or_zero(f32v v) { return select(v - v == 0.0f, v, splat(0.0f)); }

template <class T, class Out>
void scale_of(const ClipCpuParams& p, int64_t begin, int64_t end, float scale) {
  const T* bucket = static_cast<const T*>(p.bucket) + begin;
  Out* out = static_cast<Out*>(p.out) + begin;
  for_strips(end - begin, [=](int64_t j, auto width) {
    store_strip(out + j, load_strip(bucket + j, width) * scale, width);
  });
}

template <class Out>
void scale_with_residual(const ClipCpuParams& p, int64_t begin, int64_t end, float scale,
                         float factor) {
  const float* bucket = static_cast<const float*>(p.bucket) + begin;
  Out* out = static_cast<Out*>(p.out) + begin;
  float* residual = p.residual + begin;
  const float back = 1.0f / factor;
  for_strips(end - begin, [=](int64_t j, auto width) {
    const auto v = load_sum<float, true>(bucket + j, residual + j, width) * scale;
    store_strip(out + j, v, width);
    const auto lost =
        lockstep([=](f32v x) { return finite_or_zero((x - rounded(x, Out{})) * splat(back)); }, v);
    store_strip(residual + j, lost, width);
  });
}

float sum_squares(const ClipCpuParams& p, int64_t begin, int64_t end) {
  if (p.residual != nullptr) return sum_squares_of<float, true>(p, begin, end);
  switch (p.dtype) {
    case DType::kFloat32:
      return sum_squares_of<float, false>(p, begin, end);
    case DType::kBFloat16:
      return sum_squares_of<bf16, false>(p, begin, end);
    case DType::kFloat16:
      return sum_squares_of<f16, false>(p, begin, end);
  }
  return 0.0f;
}

template <class T>
void scale_from(const ClipCpuParams& p, int64_t begin, int64_t end, float by) {
  if (p.out_dtype == p.dtype) return scale_of<T, T>(p, begin, end, by);
  if constexpr (sizeof(T) == 2)
    scale_of<T, float>(p, begin, end, by);
  else
    (p.out_dtype == DType::kBFloat16 ? scale_of<T, bf16> : scale_of<T, f16>)(p, begin, end, by);
}

void scale(const ClipCpuParams& p, int64_t begin, int64_t end, float by, float factor) {
  if (p.residual != nullptr)
    return (p.out_dtype == DType::kBFloat16 ? scale_with_residual<bf16>
                                            : scale_with_residual<f16>)(p, begin, end, by, factor);
  switch (p.dtype) {
    case DType::kFloat32:
      return scale_from<float>(p, begin, end, by);
    case DType::kBFloat16:
      return scale_from<bf16>(p, begin, end, by);
    case DType::kFloat16:
      return scale_from<f16>(p, begin, end, by);
  }
}

}  // namespace

extern const ClipKernels clip_kernels = {sum_squares, scale};

}  // namespace bert_unpad::BERT_UNPAD_ISA
