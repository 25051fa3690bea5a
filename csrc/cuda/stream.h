// PyTorch's current CUDA stream, as the stable ABI gives it.
//
// The function lives in libtorch_cuda.so, which a CPU-only PyTorch does not have at build time, so
// it is looked up in the running process instead of being linked.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace bert_unpad::cuda {

inline cudaStream_t current_stream(int32_t device_index, const char* op) {
  using Function = int32_t (*)(int32_t device_index, void** stream);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library == nullptr
               ? nullptr
               : reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  if (function == nullptr)
    throw std::runtime_error(std::string(op) +
                             ": the CUDA operators need a CUDA build of PyTorch, but its "
                             "libtorch_cuda.so is not loaded in this process");
  void* stream = nullptr;
  if (function(device_index, &stream) != 0)
    throw std::runtime_error(std::string(op) + ": PyTorch has no current CUDA stream for device " +
                             std::to_string(device_index));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace bert_unpad::cuda
