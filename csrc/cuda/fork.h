// Runs work on several streams at once, between two points of the caller's stream.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <map>

#include "cuda/capture.h"
#include "cuda/launch.h"

namespace bert_unpad::cuda {

// Branch 0 is the caller's stream itself; the others start after what it was given so far. The end
// of the scope makes the caller's stream wait for them all, so later work on it, and memory that is
// freed in its order, are safe. Works while the caller's stream is being captured.
class Fork {
 public:
  static constexpr int kMaxBranches = 4;

  Fork(const char* op, cudaStream_t caller, int branches)
      : op_(op), caller_(caller), branches_(branches), sides_(sides(op)) {
    if (branches_ < 2) return;
    check_cuda(cudaEventRecord(sides_.begin, caller_), op_);
    for (int i = 1; i < branches_; ++i)
      check_cuda(cudaStreamWaitEvent(sides_.streams[i - 1], sides_.begin, 0), op_);
  }
  Fork(const Fork&) = delete;
  Fork& operator=(const Fork&) = delete;

  cudaStream_t branch(int i) const { return i == 0 ? caller_ : sides_.streams[i - 1]; }

  void join() {
    for (int i = 1; i < branches_; ++i) {
      check_cuda(cudaEventRecord(sides_.ends[i - 1], sides_.streams[i - 1]), op_);
      check_cuda(cudaStreamWaitEvent(caller_, sides_.ends[i - 1], 0), op_);
    }
    branches_ = 1;
  }

  // After an error of a launch; that error is the one to report.
  ~Fork() {
    for (int i = 1; i < branches_; ++i) {
      static_cast<void>(cudaEventRecord(sides_.ends[i - 1], sides_.streams[i - 1]));
      static_cast<void>(cudaStreamWaitEvent(caller_, sides_.ends[i - 1], 0));
    }
  }

 private:
  struct Sides {
    std::array<cudaStream_t, kMaxBranches - 1> streams;
    std::array<cudaEvent_t, kMaxBranches - 1> ends;
    cudaEvent_t begin;
  };

  // One set per thread and device: threads that share an event could wait for each other's record
  // of it. Never destroyed: at exit CUDA may be gone already.
  static Sides& sides(const char* op) {
    thread_local std::map<int, Sides> all;
    int device = 0;
    check_cuda(cudaGetDevice(&device), op);
    if (const auto found = all.find(device); found != all.end()) return found->second;
    const RelaxedCapture relaxed(op);
    Sides made{};
    check_cuda(cudaEventCreateWithFlags(&made.begin, cudaEventDisableTiming), op);
    for (int i = 0; i + 1 < kMaxBranches; ++i) {
      check_cuda(cudaStreamCreateWithFlags(&made.streams[i], cudaStreamNonBlocking), op);
      check_cuda(cudaEventCreateWithFlags(&made.ends[i], cudaEventDisableTiming), op);
    }
    return all.emplace(device, made).first->second;
  }

  const char* op_;
  cudaStream_t caller_;
  int branches_;
  Sides& sides_;
};

}  // namespace bert_unpad::cuda
