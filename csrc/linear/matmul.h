// One matrix product with an epilogue, as cuBLASLt counts: column-major matrices. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "common/types.h"
#include "linear/cublaslt.h"

namespace bert_unpad::cuda {

using cublaslt::DataType;
using cublaslt::Epilogue;

inline DataType data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return DataType::kFloat32;
    case DType::kBFloat16:
      return DataType::kBFloat16;
    case DType::kFloat16:
      break;
  }
  return DataType::kFloat16;
}

// A column-major matrix as it is stored, before any transposition.
struct StoredMatrix {
  DataType type;
  int64_t rows, cols, ld;
};

// Which dimension counts tokens. It changes with every batch, so algorithms are chosen, and
// remembered, for the next multiple of kTokenBucket.
enum class TokenDim : uint8_t { kN, kK };
inline constexpr int64_t kTokenBucket = 128;

// d = op(a) op(b) [+ c], then the epilogue; d is [m, n], the sum goes over k.
struct Matmul {
  bool transpose_a, transpose_b;
  TokenDim tokens;
  StoredMatrix a, b, d;
  const void *a_data, *b_data;
  // Null for no addend; of d's layout, and may be d itself. Not with kBias, kGeluAuxBias, kDGelu.
  const void* c_data;
  void* d_data;
  Epilogue epilogue = Epilogue::kNone;
  void* bias = nullptr;  // of `bias_type`; written by kBiasGradientB
  DataType bias_type = DataType::kFloat32;
  void* aux = nullptr;  // d's type and layout; written by kGeluAuxBias, read by kDGelu
  // 8-bit operands: what their values are multiplied with. On the device.
  const float *a_scale = nullptr, *b_scale = nullptr;
  bool fast_accumulation = false;  // 8-bit operands: less exact sums

  int64_t m() const { return d.rows; }
  int64_t n() const { return d.cols; }
  int64_t k() const { return transpose_a ? a.rows : a.cols; }
};

// Device memory for the time of a call, in stream order.
using Allocate = std::function<void*(size_t bytes)>;

// Queues the product. `op` names the operator in error messages. Where cuBLASLt has no algorithm
// with the epilogue, kernels do what that would (linear/epilogue.h). Throws where it has none for
// the product alone.
void matmul(const Matmul& product, const Allocate& allocate, cudaStream_t stream, const char* op);

}  // namespace bert_unpad::cuda
