// Turns an error of the CUDA runtime into an exception that names the operator.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace bert_unpad::cuda {

inline void check_cuda(cudaError_t error, const char* op) {
  if (error != cudaSuccess) [[unlikely]]
    throw std::runtime_error(std::string(op) + ": CUDA error: " + cudaGetErrorString(error));
}

}  // namespace bert_unpad::cuda
