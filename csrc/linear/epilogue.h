// What a product's epilogue does, by kernels, for products that cuBLASLt computes only without it.
// No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include "linear/matmul.h"

namespace bert_unpad::cuda {

// The product that the epilogue begins with. Where the epilogue changes d it goes to fp32 memory of
// its own, so that results are rounded once, as by cuBLASLt. Products have no addend there.
Matmul without_epilogue(const Matmul& product, const Allocate& allocate);

// Queues the epilogue of `product` after `plain`, which is without_epilogue(product, ...). Says so
// on stderr, once for each epilogue.
void apply_epilogue(const Matmul& product, const Matmul& plain, cudaStream_t stream,
                    const char* op);

}  // namespace bert_unpad::cuda
