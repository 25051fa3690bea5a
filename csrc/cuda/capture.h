// Work of the host beside streams that are captured into CUDA graphs.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/error.h"

namespace bert_unpad::cuda {

inline bool is_capturing(cudaStream_t stream, const char* op) {
  cudaStreamCaptureStatus status{};
  check_cuda(cudaStreamIsCapturing(stream, &status), op);
  return status != cudaStreamCaptureStatusNone;
}

// Lets this thread make streams, allocate and wait while some stream is captured, which a capture
// forbids unless it is told that they have nothing to do with it.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const char* op) {
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), op);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // later the one before
};

}  // namespace bert_unpad::cuda
