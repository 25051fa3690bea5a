// The mbarriers of a block (PTX ISA, "Parallel Synchronization and Communication Instructions:
// mbarrier").
//
// A phase completes when all expected arrivals have come and the count of bytes in flight is zero;
// the next one begins at once. What those who arrive did and had seen is passed on to those who see
// the phase complete, and so is what bulk copies wrote that completed in it.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "gpu_model/ptx/clocks.h"

namespace bert_unpad::ptx {

class MBarrier {
 public:
  static constexpr uint32_t kMaxCount = (1u << 20) - 1, kBytes = 8;

  MBarrier(uint32_t count, uint32_t actor, uint32_t clock)
      : actor(actor), expected_(count), pending_(count), clock_(clock) {}

  const uint32_t actor;    // in Clocks
  bool published = false;  // by fence.mbarrier_init
  Accessor copy_by = {};   // the last bulk copy that completed here

  // Of the phase that is open, counted from 0, and that number in the actor's clock.
  uint64_t phase() const { return phase_; }
  uint32_t clock() const { return clock_; }
  uint32_t pending() const { return pending_; }
  uint32_t expected() const { return expected_; }
  // Whether a phase of this parity has completed: that before the open one.
  bool is_past(uint32_t parity) const { return (phase_ & 1) != (parity & 1); }

  View& arriving() { return arriving_; }
  // What threads see that find a phase completed.
  const View& see() {
    seen_clock_ = clock_;
    return completed_;
  }
  bool has_unseen_copy() const { return copy_clock_ >= seen_clock_; }

  // Each gives "" or what is wrong. `drop`: of the phases to come too.
  std::string arrive(uint32_t count, bool drop) {
    if (count == 0 || count > pending_)
      return std::to_string(count) + " arrivals at an mbarrier that expects " +
             std::to_string(pending_) + " more of " + std::to_string(expected_) + " in this phase";
    pending_ -= count;
    if (drop) expected_ -= count;
    return finish();
  }
  // One more arrival is expected in this phase.
  std::string expect_arrival() {
    return ++pending_ > kMaxCount ? "an mbarrier's count has over 20 bits" : "";
  }
  std::string expect_bytes(int64_t bytes) {
    bytes_ += bytes;
    return finish();
  }
  std::string complete_bytes(int64_t bytes) { return expect_bytes(-bytes); }
  std::string complete_copy(int64_t bytes, const Accessor& by) {
    copy_by = by;
    copy_clock_ = clock_;
    return complete_bytes(bytes);
  }

 private:
  std::string finish() {
    if (bytes_ > int64_t{kMaxCount} || bytes_ < -int64_t{kMaxCount})
      return "an mbarrier's count of bytes, " + std::to_string(bytes_) + ", has over 20 bits";
    if (pending_ == 0 && bytes_ < 0)
      return "all have arrived at an mbarrier, but " + std::to_string(-bytes_) +
             " more bytes have come than it expects";
    if (pending_ != 0 || bytes_ != 0) return "";
    ++phase_;
    ++clock_;
    pending_ = expected_;
    completed_.merge(arriving_);
    arriving_.clear();
    completed_.ordered.set(actor, clock_);
    return "";
  }

  uint32_t expected_, pending_;
  uint32_t clock_, copy_clock_ = 0, seen_clock_ = 1;
  int64_t bytes_ = 0;
  uint64_t phase_ = 0;
  View arriving_, completed_;
};

// By offset in shared memory.
class MBarriers {
 public:
  void reset() {
    barriers_.clear();
    actors_.clear();
  }
  // Places that were mbarriers before keep their actor, whose clock goes on.
  void add(uint32_t offset, uint32_t count, Clocks& clocks) {
    const auto [actor, fresh] = actors_.try_emplace(offset, Actor{});
    if (fresh) actor->second = {clocks.add_barrier(), 1};
    barriers_.emplace(offset, MBarrier(count, actor->second.number, actor->second.clock));
  }
  void remove(uint32_t offset) {
    const auto found = barriers_.find(offset);
    actors_.at(offset).clock = found->second.clock() + 1;
    barriers_.erase(found);
  }
  MBarrier* find(uint32_t offset) {
    const auto found = barriers_.find(offset);
    return found == barriers_.end() ? nullptr : &found->second;
  }
  template <class F>
  void for_each(const F& f) {
    for (auto& [offset, barrier] : barriers_) f(offset, barrier);
  }

 private:
  struct Actor {
    uint32_t number = 0, clock = 0;
  };
  std::map<uint32_t, MBarrier> barriers_;
  std::map<uint32_t, Actor> actors_;
};

}  // namespace bert_unpad::ptx
