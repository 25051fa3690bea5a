// Quantisation to 8 bits on the model of a block, and 8-bit products on the model of cuBLASLt.
#include "gpu_model/block/c_api.h"
//
#include "gpu_model/block/workspaces.h"
#include "gpu_model/cublaslt.h"
//
#include "cuda/column_sum.cu"
#include "cuda/fp8_scaled.cu"
#include "linear/algorithms_cuda.cpp"
#include "linear/epilogue.cu"
#include "linear/fp8.cu"
#include "linear/fp8_product_cuda.cpp"
#include "linear/matmul_cuda.cpp"

using bert_unpad::DType;
namespace cuda = bert_unpad::cuda;

namespace {

// What quantisation by the matrix's own scale and by one that is given have in common.
template <class Params>
Params quantization(int64_t dtype, int e5m2, int64_t rows, int64_t columns, const void* x, void* q,
                    void* q_transposed) {
  Params p{};
  p.dtype = static_cast<DType>(dtype);
  p.e5m2 = e5m2 != 0;
  p.rows = rows;
  p.columns = columns;
  p.x = x;
  p.q = static_cast<uint8_t*>(q);
  p.q_transposed = static_cast<uint8_t*>(q_transposed);
  return p;
}

}  // namespace

BU_EXPORT int fp8_partials(int64_t dtype, int64_t rows, int64_t columns, int64_t* out) {
  cuda::QuantizeParams p{};
  p.dtype = static_cast<DType>(dtype);
  p.rows = rows;
  p.columns = columns;
  return bert_unpad::block_model::guarded([&] { *out = cuda::quantize_partials(p); });
}

BU_EXPORT int fp8_quantize(int64_t dtype, int e5m2, int64_t rows, int64_t columns, const void* x,
                           void* q, void* q_transposed, float* scale, float* partials) {
  auto p = quantization<cuda::QuantizeParams>(dtype, e5m2, rows, columns, x, q, q_transposed);
  p.scale = scale;
  p.partials = partials;
  return bert_unpad::block_model::guarded([&] { cuda::quantize_fp8(p, nullptr); });
}

BU_EXPORT int fp8_scaled(int64_t dtype, int e5m2, int64_t rows, int64_t columns, const void* x,
                         void* q, void* q_transposed, const float* scale, float* largest,
                         float* sums, float* partials) {
  auto p = quantization<cuda::ScaledParams>(dtype, e5m2, rows, columns, x, q, q_transposed);
  p.scale = scale;
  p.largest = largest;
  p.sums = sums;
  p.partials = partials;
  return bert_unpad::block_model::guarded(
      [&] { cuda::quantize_fp8_scaled("quantize_fp8_scaled", p, nullptr); });
}

// Of `count` weights; sizes [count, 2]: rows, columns. `partials` null: writes how many there are.
BU_EXPORT int fp8_weights(int64_t count, const int64_t* sizes, const float* const* weights,
                          uint8_t* const* q, uint8_t* const* q_transposed, float* const* scales,
                          float* partials, int64_t* partial_count) {
  std::vector<cuda::Fp8Matrix> list;
  for (int64_t i = 0; i < count; ++i)
    list.push_back(
        {{sizes[2 * i], sizes[2 * i + 1], q[i], q_transposed[i]}, weights[i], scales[i]});
  return bert_unpad::block_model::guarded([&] {
    *partial_count = cuda::weight_partials(list);
    if (partials != nullptr) cuda::quantize_weights(list, partials, nullptr);
  });
}

BU_EXPORT int fp8_product(int a_e5m2, int b_e5m2, int64_t a_rows, int64_t b_rows, int64_t k,
                          int sum_over_tokens, const void* a, const void* b, const float* a_scale,
                          const float* b_scale, const void* bias, void* out, int64_t out_dtype,
                          int accumulate) {
  cuda::Fp8Product p{};
  p.a_e5m2 = a_e5m2 != 0;
  p.b_e5m2 = b_e5m2 != 0;
  p.a_rows = a_rows;
  p.b_rows = b_rows;
  p.k = k;
  p.tokens = sum_over_tokens != 0 ? cuda::TokenDim::kK : cuda::TokenDim::kN;
  p.a = a;
  p.b = b;
  p.a_scale = a_scale;
  p.b_scale = b_scale;
  p.bias = bias;
  p.out = out;
  p.out_dtype = static_cast<DType>(out_dtype);
  p.accumulate = accumulate != 0;
  return bert_unpad::block_model::guarded([&] {
    bert_unpad::block_model::Workspaces workspaces;
    const auto allocate = [&](size_t bytes) { return workspaces.take(bytes); };
    cuda::matmul(cuda::fp8_matmul(p), allocate, nullptr, "fp8_product");
  });
}

BU_EXPORT int refuse_epilogue(int64_t epilogue) {
  bert_unpad::cublaslt::library.refused = static_cast<bert_unpad::cublaslt::Epilogue>(epilogue);
  return 0;
}

// The conversion alone.
BU_EXPORT int fp8_convert(const float* x, int64_t count, int e5m2, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = static_cast<uint8_t>(e5m2 ? bert_unpad::to_fp8<bert_unpad::E5M2>(x[i])
                                       : bert_unpad::to_fp8<bert_unpad::E4M3>(x[i]));
  return 0;
}
