// What the files of conformance kernels share: they are compiled for the model of a block or, by
// nvcc, for a GPU.
#pragma once

#ifndef __CUDACC__
#include "gpu_model/block/c_api.h"
#endif

#include <cstdint>
#include <exception>

#include "common/types.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define BU_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace bert_unpad::conformance {

#ifdef __CUDACC__
template <class F>
int guarded(const F& f) {
  try {
    f();
    return cudaDeviceSynchronize();
  } catch (const std::exception&) {
    return -1;
  }
}
#else
using block_model::guarded;
#endif

// f.operator()<T>() for bf16 or fp16.
template <class F>
void dispatch16(int64_t dtype, const F& f) {
  if (static_cast<DType>(dtype) == DType::kBFloat16)
    f.template operator()<bf16>();
  else
    f.template operator()<f16>();
}

}  // namespace bert_unpad::conformance
