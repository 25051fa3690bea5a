// Asynchronous copies that a thread has started and not yet waited for.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu_model/block/site.h"

namespace bert_unpad::block_model {

struct AsyncCopy {
  uint32_t offset, bytes;
  int group;
  // Where the data still has to be read from when the copy lands; null if `data` has it.
  const void* source;
  unsigned char data[16];
  Site site;
};

class PendingCopies {
 public:
  void clear() {
    copies_.clear();
    groups_ = 0;
  }
  bool empty() const { return copies_.empty(); }
  const AsyncCopy& oldest() const { return copies_.front(); }

  void start(AsyncCopy copy) {
    copy.group = groups_;
    copies_.push_back(copy);
  }
  void commit() { ++groups_; }

  // Calls land(copy) for the copies of all committed groups but the youngest `pending`.
  template <class F>
  void wait(int pending, const F& land) {
    size_t landed = 0;
    while (landed < copies_.size() && copies_[landed].group + pending < groups_)
      land(copies_[landed++]);
    copies_.erase(copies_.begin(), copies_.begin() + static_cast<std::ptrdiff_t>(landed));
  }

 private:
  std::vector<AsyncCopy> copies_;  // oldest first
  int groups_ = 0;                 // committed so far
};

}  // namespace bert_unpad::block_model
