// What the current device is able to do, by its compute capability.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "cuda/error.h"

namespace bert_unpad::cuda {

// Times 10.
inline int compute_capability(const char* op) {
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), op);
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), op);
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), op);
  return 10 * major + minor;
}

// For operators that multiply bf16 on tensor cores. Others take bf16 on every device.
inline void check_bf16_products(const char* op, int capability) {
  if (capability >= 80) [[likely]]
    return;
  throw std::runtime_error(std::string(op) +
                           ": bfloat16 needs a GPU of compute capability 8.0 or later, this one "
                           "has " +
                           std::to_string(capability / 10) + '.' + std::to_string(capability % 10) +
                           "; use float16");
}

}  // namespace bert_unpad::cuda
