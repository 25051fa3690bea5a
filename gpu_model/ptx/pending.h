// What happens at some time after the instruction that starts it, without a thread: bulk copies,
// and arrivals at mbarriers once copies of a thread have landed.
//
// The seed decides whether a task is done as soon as possible or when nothing else goes on.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu_model/ptx/clocks.h"

namespace bert_unpad::ptx {

struct Block;

struct PendingTask {
  Accessor by;
  uint32_t barrier;  // its offset
  bool early = false;
  // A bulk copy, with its source or its data; or, with `bytes` 0, the arrival of a thread after its
  // copies up to a number.
  uint32_t offset = 0, bytes = 0;
  const unsigned char* source = nullptr;
  std::vector<unsigned char> data;
  uint64_t copies = 0;
};

class PendingWork {
 public:
  void clear() { tasks_.clear(); }
  void add(Block& block, PendingTask task);

  void run_early(Block& block) {
    while (has_early_ && run_next(block, true)) {
    }
  }
  bool run_any(Block& block) { return run_next(block, false); }
  // Of lanes of a warp that exit: arrivals that are due.
  void finish_copies(Block& block, uint32_t warp, uint32_t lanes);

 private:
  bool run_next(Block& block, bool early_only);
  static void run(Block& block, const PendingTask& task);

  std::vector<PendingTask> tasks_;
  bool has_early_ = false;
};

}  // namespace bert_unpad::ptx
