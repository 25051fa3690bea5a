// Turns an error of the CUDA runtime into an exception that names the operator and says what to do
// where that is known.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace bert_unpad::cuda {

inline void check_cuda(cudaError_t error, const char* op) {
  if (error == cudaSuccess) [[likely]]
    return;
  std::string message = std::string(op) + ": CUDA error: " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice)
    message +=
        "; this GPU's architecture is older than those that were built, or of another kind: "
        "`python -m bert_unpad.info` lists both, and TORCH_CUDA_ARCH_LIST chooses what is built "
        "(7.5 and later)";
  throw std::runtime_error(message);
}

}  // namespace bert_unpad::cuda
