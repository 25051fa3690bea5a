// The epilogues of matmul.h by kernels: one pass over the product in fp32, or over op(B) for the
// gradient of a bias. A thread keeps its column, and so its bias, and walks down the rows. Nothing
// is vectorised: this is for a cuBLASLt that should not have refused.
#include "linear/epilogue.h"

#include <cstdio>
#include <mutex>
#include <set>

#include "cuda/column_sum.h"
#include "cuda/gelu_math.h"
#include "cuda/launch.h"
#include "cuda/vector.h"

namespace bert_unpad::cuda {
namespace {

constexpr int kBlocks = 8;  // on an SM

// Row-major [rows, columns], as PyTorch sees d.
struct EpilogueParams {
  Epilogue epilogue;
  int64_t rows, columns;
  const float* product;
  const void* bias;  // null where there is none
  DType bias_dtype, dtype;
  void *aux, *out;  // of dtype
};

BU_KERNEL(ColumnGrid::kThreads, kBlocks) epilogue_kernel(BU_PARAMS EpilogueParams p) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= p.columns) return;
  const float bias = p.bias == nullptr ? 0.0f : load_parameter(p.bias, p.bias_dtype, column);
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  for (; row < p.rows; row += step) {
    const int64_t i = row * p.columns + column;
    float u = load_global<float>(p.product + i) + bias;
    if (p.epilogue == Epilogue::kDGelu)
      u *= gelu_derivative<true>(load_parameter(p.aux, p.dtype, i));
    if (p.epilogue == Epilogue::kGeluAuxBias) {
      store_parameter(p.aux, p.dtype, i, u);
      u = gelu<true>(u);
    }
    store_parameter(p.out, p.dtype, i, u);
  }
}

DType dtype_of(DataType type) {
  return type == DataType::kFloat32    ? DType::kFloat32
         : type == DataType::kBFloat16 ? DType::kBFloat16
                                       : DType::kFloat16;
}

const char* name_of(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kBias:
      return "BIAS";
    case Epilogue::kGeluAuxBias:
      return "GELU_AUX_BIAS";
    case Epilogue::kDGelu:
      return "DGELU";
    default:
      return "BGRADB";
  }
}

// Not by Python's warnings: a backward pass does not hold the interpreter's lock.
void warn_once(Epilogue epilogue, const char* op) {
  static std::mutex mutex;
  static std::set<Epilogue> warned;
  const std::scoped_lock lock(mutex);
  if (!warned.insert(epilogue).second) return;
  std::fprintf(stderr,
               "bert_unpad: warning: %s: cuBLASLt has no algorithm with the epilogue %s for some "
               "product; a separate kernel does what the epilogue would, which takes longer\n",
               op, name_of(epilogue));
}

}  // namespace

Matmul without_epilogue(const Matmul& product, const Allocate& allocate) {
  Matmul plain = product;
  plain.epilogue = Epilogue::kNone;
  plain.bias = plain.aux = nullptr;
  if (product.epilogue == Epilogue::kBiasGradientB || product.d.type == DataType::kFloat32)
    return plain;
  plain.d.type = DataType::kFloat32;
  plain.d_data = allocate(product.d.ld * product.d.cols * sizeof(float));
  return plain;
}

void apply_epilogue(const Matmul& product, const Matmul& plain, cudaStream_t stream,
                    const char* op) {
  const Matmul& p = product;
  warn_once(p.epilogue, op);
  if (p.epilogue == Epilogue::kBiasGradientB) {
    return column_sum(op, p.b_data, dtype_of(p.b.type), p.b.cols, p.b.rows, p.bias,
                      dtype_of(p.bias_type), stream);
  }
  const ColumnGrid g(p.n(), p.m(), int64_t{sm_count(op)} * kBlocks);
  launch(op, epilogue_kernel, g.grid, g.block, 0, stream,
         EpilogueParams{p.epilogue, p.n(), p.m(), static_cast<const float*>(plain.d_data), p.bias,
                        dtype_of(p.bias_type), dtype_of(p.d.type), p.aux, p.d_data});
}

}  // namespace bert_unpad::cuda
