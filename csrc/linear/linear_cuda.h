// The three products of a linear layer on a GPU, as the binding asks for them. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/types.h"
#include "linear/matmul.h"

namespace bert_unpad::cuda {

// Row-major matrices as PyTorch has them: x [tokens, in], weight [out, in], y [tokens, out]; x,
// weight and y are of `dtype`, 16 bits. in and out are multiples of 8.
struct LinearShape {
  DType dtype;
  int64_t tokens, in_features, out_features;
};

// y = x weight^T + bias. With `pre`: pre = that, and y = its tanh GELU. bias is of dtype or null;
// `pre` needs a bias.
Matmul linear_forward(const LinearShape& shape, const void* x, const void* weight, const void* bias,
                      void* y, void* pre);

// dx = dy weight [+ addend]. With `pre` [tokens, in]: that times tanh GELU's derivative there. Give
// one of the two at most.
Matmul linear_dgrad(const LinearShape& shape, const void* dy, const void* weight,
                    const void* addend, const void* pre, void* dx);

// dweight = dy^T x [+ dweight] and, where dbias [out] is not null, dbias = the sum of dy's rows;
// both of `out_dtype`.
Matmul linear_wgrad(const LinearShape& shape, const void* dy, const void* x, bool accumulate,
                    void* dweight, DType out_dtype, void* dbias);

}  // namespace bert_unpad::cuda
