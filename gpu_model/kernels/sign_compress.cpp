// The sign_* operators on the model of a block.
#include "gpu_model/block/c_api.h"
//
#include "sign_compress/sign_compress.cu"

using bert_unpad::DType;
namespace cuda = bert_unpad::cuda;

BU_EXPORT int sign_blocks(int64_t size, int64_t* blocks) {
  return bert_unpad::block_model::guarded([&] { *blocks = cuda::sign_blocks(size); });
}

BU_EXPORT int sign_scale(int64_t dtype, int64_t size, const void* value, float* error, float* scale,
                         float* partials) {
  return bert_unpad::block_model::guarded([&] {
    cuda::sign_scale(
        {static_cast<DType>(dtype), size, value, error, nullptr, scale, nullptr, partials},
        nullptr);
  });
}

BU_EXPORT int sign_pack(int64_t dtype, int64_t size, const void* value, float* error, uint8_t* bits,
                        float* scale, const float* guard) {
  return bert_unpad::block_model::guarded([&] {
    cuda::sign_pack({static_cast<DType>(dtype), size, value, error, bits, scale, guard, nullptr},
                    nullptr);
  });
}

BU_EXPORT int sign_mean(const uint8_t* bits, int64_t rows, int64_t stride, int64_t size,
                        const float* scales, float* out, float factor, int add, int rows_follow,
                        const float* guard) {
  return bert_unpad::block_model::guarded([&] {
    cuda::sign_mean(
        {bits, rows, stride, size, scales, out, factor, add != 0, rows_follow != 0, guard},
        nullptr);
  });
}
