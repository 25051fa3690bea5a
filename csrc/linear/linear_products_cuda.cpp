// A linear layer's products in cuBLASLt's terms: a row-major [r, c] matrix is a column-major
// [c, r] one, so every product is computed transposed and nothing is copied.
#include "linear/linear_cuda.h"

namespace bert_unpad::cuda {
namespace {

// A row-major [rows, columns] matrix.
StoredMatrix row_major(DType dtype, int64_t rows, int64_t columns) {
  return {data_type(dtype), columns, rows, columns};
}

Matmul product(const LinearShape& s, bool transpose_a, bool transpose_b, TokenDim tokens) {
  Matmul p{};
  p.transpose_a = transpose_a;
  p.transpose_b = transpose_b;
  p.tokens = tokens;
  p.epilogue = Epilogue::kNone;
  p.bias_type = data_type(s.dtype);
  return p;
}

}  // namespace

// y^T [out, tokens] = (weight^T)^T x^T
Matmul linear_forward(const LinearShape& s, const void* x, const void* weight, const void* bias,
                      void* y, void* pre) {
  Matmul p = product(s, true, false, TokenDim::kN);
  p.a = row_major(s.dtype, s.out_features, s.in_features);
  p.a_data = weight;
  p.b = row_major(s.dtype, s.tokens, s.in_features);
  p.b_data = x;
  p.d = row_major(s.dtype, s.tokens, s.out_features);
  p.d_data = y;
  if (bias != nullptr) {
    p.epilogue = pre == nullptr ? Epilogue::kBias : Epilogue::kGeluAuxBias;
    p.bias = const_cast<void*>(bias);
    p.aux = pre;
  }
  return p;
}

// dx^T [in, tokens] = weight^T dy^T
Matmul linear_dgrad(const LinearShape& s, const void* dy, const void* weight, const void* addend,
                    const void* pre, void* dx) {
  Matmul p = product(s, false, false, TokenDim::kN);
  p.a = row_major(s.dtype, s.out_features, s.in_features);
  p.a_data = weight;
  p.b = row_major(s.dtype, s.tokens, s.out_features);
  p.b_data = dy;
  p.c_data = addend;
  p.d = row_major(s.dtype, s.tokens, s.in_features);
  p.d_data = dx;
  if (pre != nullptr) {
    p.epilogue = Epilogue::kDGelu;
    p.aux = const_cast<void*>(pre);
  }
  return p;
}

// dweight^T [in, out] = x^T (dy^T)^T
Matmul linear_wgrad(const LinearShape& s, const void* dy, const void* x, bool accumulate,
                    void* dweight, DType out_dtype, void* dbias) {
  Matmul p = product(s, false, true, TokenDim::kK);
  p.a = row_major(s.dtype, s.tokens, s.in_features);
  p.a_data = x;
  p.b = row_major(s.dtype, s.tokens, s.out_features);
  p.b_data = dy;
  p.d = row_major(out_dtype, s.out_features, s.in_features);
  p.d_data = dweight;
  p.c_data = accumulate ? dweight : nullptr;
  if (dbias != nullptr) {
    p.epilogue = Epilogue::kBiasGradientB;
    p.bias = dbias;
    p.bias_type = data_type(out_dtype);
  }
  return p;
}

}  // namespace bert_unpad::cuda
