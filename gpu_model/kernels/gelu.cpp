// bias_gelu on the model of a block.
#include "gpu_model/block/c_api.h"
//
#include "gelu/gelu.cu"

using bert_unpad::DType;
using bert_unpad::cuda::GeluCudaParams;

namespace {

GeluCudaParams params(int64_t dtype, int64_t bias_dtype, int64_t rows, int64_t columns, int tanh) {
  GeluCudaParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.bias_dtype = static_cast<DType>(bias_dtype);
  p.rows = rows;
  p.columns = columns;
  p.tanh = tanh != 0;
  return p;
}

}  // namespace

BU_EXPORT int gelu_forward(int64_t dtype, int64_t bias_dtype, int64_t rows, int64_t columns,
                           int tanh, const void* x, const void* bias, void* y) {
  return bert_unpad::block_model::guarded([&] {
    GeluCudaParams p = params(dtype, bias_dtype, rows, columns, tanh);
    p.x = x;
    p.bias = bias;
    p.y = y;
    bert_unpad::cuda::bias_gelu(p, nullptr);
  });
}

BU_EXPORT int gelu_backward(int64_t dtype, int64_t bias_dtype, int64_t rows, int64_t columns,
                            int tanh, const void* x, const void* bias, const void* dy, void* dx,
                            void* dbias, float* partials, uint32_t* tickets) {
  return bert_unpad::block_model::guarded([&] {
    GeluCudaParams p = params(dtype, bias_dtype, rows, columns, tanh);
    p.x = x;
    p.bias = bias;
    p.dy = dy;
    p.dx = dx;
    p.dbias = dbias;
    p.partials = partials;
    p.tickets = tickets;
    bert_unpad::cuda::bias_gelu_backward(p, nullptr);
  });
}

// Rows of partials, and tickets.
BU_EXPORT int gelu_scratch(int64_t dtype, int64_t rows, int64_t columns, const void* x,
                           const void* dy, const void* dx, int64_t* sizes) {
  return bert_unpad::block_model::guarded([&] {
    GeluCudaParams p = params(dtype, dtype, rows, columns, 0);
    p.x = x;
    p.dy = dy;
    p.dx = const_cast<void*>(dx);
    const auto [scratch_rows, tickets] = bert_unpad::cuda::bias_gelu_scratch(p);
    sizes[0] = scratch_rows;
    sizes[1] = tickets;
  });
}
