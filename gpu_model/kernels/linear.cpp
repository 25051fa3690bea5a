// A linear layer's products on the model of cuBLASLt.
#include "gpu_model/block/c_api.h"
//
#include "gpu_model/block/workspaces.h"
#include "gpu_model/cublaslt.h"
//
#include "cuda/column_sum.cu"
#include "linear/algorithms_cuda.cpp"
#include "linear/epilogue.cu"
#include "linear/linear_products_cuda.cpp"
#include "linear/matmul_cuda.cpp"

using bert_unpad::DType;
namespace cuda = bert_unpad::cuda;
namespace cublaslt = bert_unpad::cublaslt;

namespace {

cuda::LinearShape shape(int64_t dtype, int64_t tokens, int64_t in, int64_t out) {
  return {static_cast<DType>(dtype), tokens, in, out};
}

bert_unpad::block_model::Workspaces workspaces;

void run(const cuda::Matmul& product) {
  workspaces.clear();
  const auto allocate = [](size_t bytes) { return workspaces.take(bytes); };
  cuda::matmul(product, allocate, nullptr, "linear");
}

}  // namespace

BU_EXPORT int linear_forward(int64_t dtype, int64_t tokens, int64_t in, int64_t out, const void* x,
                             const void* weight, const void* bias, void* y, void* pre) {
  return bert_unpad::block_model::guarded(
      [&] { run(cuda::linear_forward(shape(dtype, tokens, in, out), x, weight, bias, y, pre)); });
}

BU_EXPORT int linear_dgrad(int64_t dtype, int64_t tokens, int64_t in, int64_t out, const void* dy,
                           const void* weight, const void* addend, const void* pre, void* dx) {
  return bert_unpad::block_model::guarded(
      [&] { run(cuda::linear_dgrad(shape(dtype, tokens, in, out), dy, weight, addend, pre, dx)); });
}

BU_EXPORT int linear_wgrad(int64_t dtype, int64_t tokens, int64_t in, int64_t out, const void* dy,
                           const void* x, int accumulate, void* dweight, int64_t out_dtype,
                           void* dbias) {
  return bert_unpad::block_model::guarded([&] {
    run(cuda::linear_wgrad(shape(dtype, tokens, in, out), dy, x, accumulate != 0, dweight,
                           static_cast<DType>(out_dtype), dbias));
  });
}

BU_EXPORT int set_timing(int enabled, const char* path) {
  return bert_unpad::block_model::guarded([&] { cuda::set_timing(enabled != 0, path); });
}

BU_EXPORT int set_capturing(int capturing) {
  bert_unpad::block_model::capturing = capturing != 0;
  return 0;
}

BU_EXPORT int set_library(int64_t algorithms, int last_is_choosy) {
  cublaslt::library = {};
  cublaslt::library.algorithms = static_cast<int>(algorithms);
  cublaslt::library.last_is_choosy = last_is_choosy != 0;
  return 0;
}

// 0: none.
BU_EXPORT int refuse_epilogue(int64_t epilogue) {
  cublaslt::library.refused = static_cast<cublaslt::Epilogue>(epilogue);
  return 0;
}

// Heuristic calls, products, the last product's algorithm, bytes of memory that the last call took,
// the last preference's alignments.
BU_EXPORT int library_counts(int64_t* out) {
  const cublaslt::Library& library = cublaslt::library;
  *out++ = library.heuristic_calls;
  *out++ = library.products;
  *out++ = static_cast<int64_t>(library.last_algorithm);
  *out++ = workspaces.bytes();
  for (const uint32_t bytes : library.last_preference.alignment) *out++ = bytes;
  return 0;
}
