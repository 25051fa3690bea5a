// CPU bindings of clip_bucket_: checks, chunks, the coefficient.
#include "clip/clip.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "clip/arguments.h"
#include "clip/coefficient.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace bert_unpad {

BU_ISA_TABLE(ClipKernels, clip_kernels)

namespace {

// A pure function of the bucket's size, so that its norm does not depend on threads. Within a
// chunk a lane adds up 256 squares or so, which loses 1e-6 of the sum; chunks add up in fp64.
constexpr int64_t kChunk = 16384;

template <class F>
void for_chunks(int64_t size, const F& fn) {
  const int64_t chunks = (size + kChunk - 1) / kChunk;
  parallel_for(0, chunks, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) fn(i, i * kChunk, std::min(size, (i + 1) * kChunk));
  });
}

Tensor clip(const ClipArguments& a, const Tensor& bucket) {
  const ClipCpuParams p{a.dtype, a.out_dtype, a.bucket, a.out, a.residual};
  const ClipKernels& kernels = clip_kernels();
  std::vector<float> partials((a.size + kChunk - 1) / kChunk);
  for_chunks(a.size, [&](int64_t i, int64_t begin, int64_t end) {
    partials[i] = kernels.sum_squares(p, begin, end);
  });
  double sum = 0.0;
  for (float partial : partials) sum += partial;
  const auto norm = static_cast<float>(std::sqrt(sum));
  Tensor result = torch::stable::new_empty(bucket, {}, ScalarType::Float);
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
