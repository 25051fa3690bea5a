// The counters of kernels whose last block has more to do (cuda/last_block.h). They are zero before
// a kernel, which leaves them so: no other work has to clear them first.
//
// Kernels that may run at once must not share counters. The kernels of a stream run one after the
// other and share. A graph may be launched on any stream: a kernel that is captured gets counters
// that are never given to another, some hundred bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/capture.h"
#include "cuda/error.h"

namespace bert_unpad::cuda {

struct Counters {
  uint32_t* p = nullptr;
  int64_t count = 0;
};

// Of the current device; never freed.
inline Counters new_counters(const char* op, int64_t count) {
  const RelaxedCapture relaxed(op);
  const size_t bytes = count * sizeof(uint32_t);
  void* p = nullptr;
  cudaStream_t stream = nullptr;
  check_cuda(cudaMalloc(&p, bytes), op);
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), op);
  check_cuda(cudaMemsetAsync(p, 0, bytes, stream), op);
  check_cuda(cudaStreamSynchronize(stream), op);
  check_cuda(cudaStreamDestroy(stream), op);
  return {static_cast<uint32_t*>(p), count};
}

// `count` counters for a kernel that is queued on `stream` of the current device.
inline uint32_t* tickets(const char* op, cudaStream_t stream, int64_t count) {
  constexpr int64_t kChunk = 1 << 16;  // 256 KiB
  static std::mutex mutex;
  static std::map<int, Counters> unused;
  static std::map<std::pair<int, cudaStream_t>, Counters> of_streams;
  int device = 0;
  check_cuda(cudaGetDevice(&device), op);
  const bool captured = is_capturing(stream, op);
  const std::scoped_lock lock(mutex);
  const auto cut = [&](int64_t wanted) {
    Counters& rest = unused[device];
    if (rest.count < wanted) rest = new_counters(op, std::max(wanted, kChunk));
    const Counters part{rest.p, wanted};
    rest = {rest.p + wanted, rest.count - wanted};
    return part;
  };
  if (captured) return cut(count).p;
  Counters& own = of_streams[{device, stream}];
  if (own.count < count) own = cut(2 * count);
  return own.p;
}

}  // namespace bert_unpad::cuda
