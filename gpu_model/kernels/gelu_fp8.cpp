// bias_gelu_fp8 on the model of a block.
#include "gpu_model/block/c_api.h"
//
#include "cuda/column_sum.cu"
#include "gelu/gelu_fp8.cu"

using bert_unpad::DType;
namespace cuda = bert_unpad::cuda;

// Forward where dy is null.
BU_EXPORT int gelu_fp8(int64_t dtype, int64_t bias_dtype, int64_t rows, int64_t columns, int tanh,
                       const void* x, const void* bias, const void* dy, const float* scale, void* q,
                       void* q_transposed, float* largest, void* dbias, float* partials) {
  cuda::GeluFp8Params p{};
  p.rows = rows;
  p.columns = columns;
  p.q = static_cast<uint8_t*>(q);
  p.q_transposed = static_cast<uint8_t*>(q_transposed);
  p.dtype = static_cast<DType>(dtype);
  p.bias_dtype = static_cast<DType>(bias_dtype);
  p.tanh = tanh != 0;
  p.x = x;
  p.bias = bias;
  p.dy = dy;
  p.scale = scale;
  p.largest = largest;
  p.dbias = dbias;
  p.partials = partials;
  return bert_unpad::block_model::guarded(
      [&] { dy == nullptr ? bias_gelu_fp8(p, nullptr) : bias_gelu_fp8_backward(p, nullptr); });
}
