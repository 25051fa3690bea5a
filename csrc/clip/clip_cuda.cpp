// CUDA bindings of clip_bucket_: checks, scratch memory, stream.
#include "clip/clip_cuda.h"
#include "common/allocate.h"

#include "clip/arguments.h"
#include "cuda/binding.h"

namespace bert_unpad::cuda {
namespace {

Tensor clip(const char* op, const ClipArguments& a, const Tensor& bucket) {
  const Call call(bucket, op);
  ClipCudaParams p{a.dtype, a.out_dtype, a.size,   a.bucket, a.out,  a.residual,
                   a.bound, a.max_norm,  a.factor, nullptr,  nullptr};
  Tensor norm = allocate(bucket, {}, ScalarType::Float);
  Tensor partials = allocate(bucket, {clip_blocks(p)}, ScalarType::Float);
  p.norm = norm.mutable_data_ptr<float>();
  p.partials = partials.mutable_data_ptr<float>();
  clip_bucket(p, call.stream);
  return norm;
}

Tensor clip_bucket_(Tensor bucket, double max_norm, std::optional<Tensor> bound, double factor) {
  const char* op = "clip_bucket_";
  return clip(op, clip_arguments(op, bucket, bucket, std::nullopt, max_norm, bound, factor),
              bucket);
}

Tensor clip_bucket_into(Tensor bucket, Tensor out, std::optional<Tensor> residual, double max_norm,
                        std::optional<Tensor> bound, double factor) {
  const char* op = "clip_bucket_into";
  return clip(op, clip_arguments(op, bucket, out, residual, max_norm, bound, factor), bucket);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("clip_bucket_", TORCH_BOX(&clip_bucket_));
  m.impl("clip_bucket_into", TORCH_BOX(&clip_bucket_into));
}

}  // namespace bert_unpad::cuda
