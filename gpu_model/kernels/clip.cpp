// clip_bucket_ on the model of a block.
#include "gpu_model/block/c_api.h"
//
#include "clip/clip.cu"

using bert_unpad::DType;
using bert_unpad::cuda::ClipCudaParams;

namespace {

ClipCudaParams params(int64_t dtype, int64_t out_dtype, int64_t size, const void* bucket, void* out,
                      float* residual) {
  ClipCudaParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.out_dtype = static_cast<DType>(out_dtype);
  p.size = size;
  p.bucket = bucket;
  p.out = out;
  p.residual = residual;
  return p;
}

}  // namespace

BU_EXPORT int clip_blocks(int64_t dtype, int64_t out_dtype, int64_t size, const void* bucket,
                          void* out, float* residual, int64_t* blocks) {
  return bert_unpad::block_model::guarded([&] {
    *blocks = bert_unpad::cuda::clip_blocks(params(dtype, out_dtype, size, bucket, out, residual));
  });
}

BU_EXPORT int clip_bucket(int64_t dtype, int64_t out_dtype, int64_t size, const void* bucket,
                          void* out, float* residual, const float* bound, float max_norm,
                          float factor, float* partials, float* norm) {
  return bert_unpad::block_model::guarded([&] {
    ClipCudaParams p = params(dtype, out_dtype, size, bucket, out, residual);
    p.bound = bound;
    p.max_norm = max_norm;
    p.factor = factor;
    p.partials = partials;
    p.norm = norm;
    bert_unpad::cuda::clip_bucket(p, nullptr);
  });
}
