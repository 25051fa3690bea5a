// 8-bit matrix products on a GPU: quantisation of a matrix, and the one form that cuBLASLt has for
// them. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "cuda/fp8_result.h"
#include "linear/matmul.h"

namespace bert_unpad::cuda {

// x [rows, columns], and what it becomes.
struct Fp8Matrix : Fp8Result {
  const void* x;
  float* scale;  // what q is to be multiplied with
};

struct QuantizeParams : Fp8Matrix {
  DType dtype;  // of x
  bool e5m2;
  float* partials;  // [quantize_partials(p)]: scratch memory
};

int64_t quantize_partials(const QuantizeParams& p);

// scale = max |x| / the format's largest value (1 for a matrix of zeros), q = round(x / scale),
// which is NaN where x is not finite. Current scaling, a tensor at a time: no history, so that
// nothing has to be saved with a run.
void quantize_fp8(const QuantizeParams& p, cudaStream_t stream);

// quantize_fp8 of fp32 matrices that become E4M3, in two kernels for up to 64 of them. `partials`:
// scratch memory, [weight_partials(weights)].
int64_t weight_partials(const std::vector<Fp8Matrix>& weights);
void quantize_weights(const std::vector<Fp8Matrix>& weights, float* partials, cudaStream_t stream);

// y [b.rows, a.rows] = (a_scale * b_scale) b a^T + bias [+ y], of row-major 8-bit a [a_rows, k] and
// b [b_rows, k]; bias [a_rows], of the type that fp8_bias_dtype gives, or null.
struct Fp8Product {
  bool a_e5m2, b_e5m2;
  int64_t a_rows, b_rows, k;
  TokenDim tokens;
  const void *a, *b;
  const float *a_scale, *b_scale;
  const void* bias;
  void* out;
  DType out_dtype;
  bool accumulate;  // add to out; not with a bias
  bool fast_accumulation;
};

// 8-bit products with fp32 results take a bf16 bias only.
inline DType fp8_bias_dtype(DType out) { return out == DType::kFloat32 ? DType::kBFloat16 : out; }

Matmul fp8_matmul(const Fp8Product& p);

}  // namespace bert_unpad::cuda
