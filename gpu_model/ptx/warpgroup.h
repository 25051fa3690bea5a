// Four neighbouring warps that execute wgmma together, and what they have in flight.
//
// The warps run apart. A wgmma is one operation of all four: it happens at some time after the last
// of them has issued it, and before the first that waits for it goes on. What its warps have
// executed of wgmma's instructions has to be the same.
#pragma once

#include <cstdint>
#include <deque>

#include "gpu_model/ptx/program.h"

namespace bert_unpad::ptx {

struct WgmmaOperation {
  uint32_t pc;
  const WgmmaForm* form;
  uint64_t a, b;  // descriptors
  bool adds;      // scale-d
  uint32_t issued = 0;
  bool done = false, waited_for = false;
};

class Warpgroup {
 public:
  static constexpr uint32_t kWarps = 4;

  // One instruction of wgmma and its operands, if they have to agree.
  struct Step {
    uint32_t pc = 0;
    uint64_t a = 0, b = 0;
    bool adds = false;
    bool operator==(const Step&) const = default;
  };

  // A warp takes a step; null, or what another warp did in its place.
  const Step* take_step(uint32_t warp, const Step& step) {
    const uint64_t number = position_[warp]++;
    if (number == first_step_ + steps_.size()) {
      steps_.push_back(step);
      return nullptr;
    }
    const Step& other = steps_[number - first_step_];
    if (!(other == step)) return &other;
    while (!steps_.empty() && slowest() > first_step_) {
      steps_.pop_front();
      ++first_step_;
    }
    return nullptr;
  }
  // A warp that has taken less steps than another; kWarps if there is none.
  uint32_t late_warp() const {
    for (uint32_t warp = 0; warp < kWarps; ++warp)
      if (position_[warp] < first_step_ + steps_.size()) return warp;
    return kWarps;
  }
  const Step& next_step(uint32_t warp) const { return steps_[position_[warp] - first_step_]; }

  // The operation that a warp issues now.
  WgmmaOperation& issue(uint32_t warp, const WgmmaOperation& operation) {
    if (issued_[warp] == first_ + operations_.size()) operations_.push_back(operation);
    WgmmaOperation& own = at(issued_[warp]++);
    own.issued |= 1u << warp;
    return own;
  }
  void commit(uint32_t warp) { groups_[warp].push_back(issued_[warp]); }
  // One after the last operation of all of a warp's groups but the youngest `pending`.
  uint64_t end_of_groups(uint32_t warp, uint64_t pending) const {
    const auto& ends = groups_[warp];
    return ends.size() > pending ? ends[ends.size() - 1 - pending] : waited_[warp];
  }
  bool all_issued(uint64_t end) const {
    for (const uint64_t count : issued_)
      if (count < end) return false;
    return true;
  }
  uint64_t issued(uint32_t warp) const { return issued_[warp]; }

  // f(operation, number) for those that all warps have issued, up to `end`.
  template <class F>
  void for_operations(uint64_t end, const F& f) {
    for (uint64_t number = first_; number < end; ++number) f(at(number), number);
  }
  // f(operation, number) for those that a warp has not waited for, up to `end`; then it has.
  template <class F>
  void wait(uint32_t warp, uint64_t end, const F& f) {
    for (; waited_[warp] < end; ++waited_[warp]) f(at(waited_[warp]), waited_[warp]);
    auto& ends = groups_[warp];
    while (!ends.empty() && ends.front() <= end) ends.pop_front();
    while (!operations_.empty() && first_ < least(waited_)) {
      operations_.pop_front();
      ++first_;
    }
  }
  const WgmmaOperation* not_waited_for(uint32_t warp) const {
    return waited_[warp] < issued_[warp] ? &operations_[waited_[warp] - first_] : nullptr;
  }

 private:
  WgmmaOperation& at(uint64_t number) { return operations_[number - first_]; }
  static uint64_t least(const uint64_t* counts) {
    uint64_t result = counts[0];
    for (uint32_t warp = 1; warp < kWarps; ++warp)
      if (counts[warp] < result) result = counts[warp];
    return result;
  }
  uint64_t slowest() const { return least(position_); }

  std::deque<Step> steps_;
  std::deque<WgmmaOperation> operations_;  // that not all warps have waited for
  uint64_t first_step_ = 0, first_ = 0;    // numbers of the first in these
  uint64_t position_[kWarps] = {}, issued_[kWarps] = {}, waited_[kWarps] = {};
  std::deque<uint64_t> groups_[kWarps];  // their ends: numbers of operations
};

}  // namespace bert_unpad::ptx
