// CPU bindings of clip_bucket_: checks, chunks, the coefficient.
#include "clip/clip.h"
#include "common/allocate.h"

#include <cmath>

#include "clip/arguments.h"
#include "clip/coefficient.h"
#include "cpu/array_chunks.h"

namespace bert_unpad {

namespace {

Tensor clip(const ClipArguments& a, const Tensor& bucket) {
  const ClipCpuParams p{a.dtype, a.out_dtype, a.bucket, a.out, a.residual};
  const ClipKernels& kernels = clip_kernels();
  const double sum = sum_over_chunks(
      a.size, [&](int64_t begin, int64_t end) { return kernels.sum_squares(p, begin, end); });
  const auto norm = static_cast<float>(std::sqrt(sum));
  Tensor result = allocate(bucket, {}, ScalarType::Float);
  *result.mutable_data_ptr<float>() = norm;

  const float bound = a.bound == nullptr ? a.max_norm : a.max_norm * *a.bound;
  const float scale = clip_scale(norm, bound, a.factor);
  if (scale == 1.0f && a.out == a.bucket) return result;
  ClipCpuParams written = p;
  // What was left before is still to be sent: a step that is skipped must not lose it.
  if (!is_finite(scale)) written.residual = nullptr;
  for_chunks(a.size, [&](int64_t, int64_t begin, int64_t end) {
    kernels.scale(written, begin, end, scale, a.factor);
  });
  return result;
}

Tensor clip_bucket_(Tensor bucket, double max_norm, std::optional<Tensor> bound, double factor) {
  return clip(clip_arguments("clip_bucket_", bucket, bucket, std::nullopt, max_norm, bound, factor),
              bucket);
}

Tensor clip_bucket_into(Tensor bucket, Tensor out, std::optional<Tensor> residual, double max_norm,
                        std::optional<Tensor> bound, double factor) {
  return clip(clip_arguments("clip_bucket_into", bucket, out, residual, max_norm, bound, factor),
              bucket);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("clip_bucket_", TORCH_BOX(&clip_bucket_));
  m.impl("clip_bucket_into", TORCH_BOX(&clip_bucket_into));
}

}  // namespace bert_unpad
