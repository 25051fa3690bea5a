// An 8-bit product in cuBLASLt's terms: y^T [a_rows, b_rows] = (a^T)^T b^T, where a row-major
// [rows, k] matrix is a column-major [k, rows] one. Hopper has this form ("TN") only, which is why
// matrices are kept transposed for the backward pass.
#include "linear/fp8_cuda.h"

namespace bert_unpad::cuda {

Matmul fp8_matmul(const Fp8Product& p) {
  const auto type = [](bool e5m2) { return e5m2 ? DataType::kE5M2 : DataType::kE4M3; };
  Matmul m{};
  m.transpose_a = true;
  m.transpose_b = false;
  m.tokens = p.tokens;
  m.a = {type(p.a_e5m2), p.k, p.a_rows, p.k};
  m.a_data = p.a;
  m.a_scale = p.a_scale;
  m.b = {type(p.b_e5m2), p.k, p.b_rows, p.k};
  m.b_data = p.b;
  m.b_scale = p.b_scale;
  m.d = {data_type(p.out_dtype), p.a_rows, p.b_rows, p.a_rows};
  m.d_data = p.out;
  m.c_data = p.accumulate ? p.out : nullptr;
  m.fast_accumulation = p.fast_accumulation;
  m.epilogue = Epilogue::kNone;
  m.bias_type = data_type(fp8_bias_dtype(p.out_dtype));
  if (p.bias != nullptr) {
    m.epilogue = Epilogue::kBias;
    m.bias = const_cast<void*>(p.bias);
  }
  return m;
}

}  // namespace bert_unpad::cuda
