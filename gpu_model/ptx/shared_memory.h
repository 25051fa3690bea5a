// A block's shared memory, and who touched each unit of it last.
//
// Two accesses of different threads, one of them a write, are a race unless something orders them:
// a barrier that both warps pass in between, an mbarrier, or within a warp bar.warp.sync
// (clocks.h). What has not been seen of an access is not ordered before what is done now. So the
// check does not depend on the schedule that was run.
//
// The async proxy (wgmma, bulk copies) sees what threads and cp.async wrote only after a proxy
// fence. What a wgmma reads is held until a warp has waited for it; no thread may write it
// meanwhile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gpu_model/ptx/clocks.h"

namespace bert_unpad::ptx {

class SharedMemory {
 public:
  bool races = true;
  bool early_use = false;  // of a copy's destination before the wait is allowed

  void reset(uint32_t bytes, uint32_t grain, const Clocks& clocks) {
    bytes_ = bytes;
    grain_ = grain;
    clocks_ = &clocks;
    // All bits set is NaN in every floating-point type.
    data_.assign((bytes + 15) / 16 * 16, 0xff);
    writes_.assign(data_.size() / grain, Write{});
    reads_.assign(writes_.size() * clocks.readers(), Touch{});
    holds_.assign(data_.size() / kPiece, Hold{});
    held_ = 0;
    atomics_.clear();
  }

  unsigned char* data(uint32_t offset) { return &data_[offset]; }

  // Each gives "" or what is wrong with the access, without the text of `what`.
  std::string range_problem(uint64_t offset, uint32_t bytes) const {
    const std::string text = " of " + std::to_string(bytes) + " bytes of shared memory at offset " +
                             std::to_string(static_cast<int64_t>(offset));
    if (offset >= bytes_ || bytes_ - offset < bytes)
      return text + ", out of bounds: the block has " + std::to_string(bytes_) + " bytes";
    return text + ", which is no multiple of that";
  }
  bool in_range(uint64_t offset, uint32_t bytes, uint32_t align) const {
    return offset % align == 0 && offset < bytes_ && bytes_ - offset >= bytes;
  }
  bool in_range(uint64_t offset, uint32_t bytes) const { return in_range(offset, bytes, bytes); }

  enum class Problem : uint8_t {
    kNone,
    kEmpty,    // never written
    kPending,  // destination of a copy that has not been waited for
    kWritten,  // by somebody, with nothing between
    kRead,
    kHeld,      // a wgmma reads it
    kUnfenced,  // written through the generic proxy, with no proxy fence since
    kBarrier    // it is an mbarrier
  };
  struct Conflict {
    Problem what = Problem::kNone;
    Accessor earlier = {};
    uint32_t offset = 0;
  };

  Conflict read(uint32_t offset, uint32_t bytes, const Accessor& by) {
    for (uint32_t unit = offset / grain_; unit < (offset + bytes) / grain_; ++unit) {
      const Write& write = writes_[unit];
      if (is_early(write)) continue;
      if (write.state != kWritten) return not_written(unit);
      if (!races) continue;
      if (!ordered(write, by)) return {Problem::kWritten, write.by(), unit * grain_};
      if (const Accessor earlier = unordered(atomics_, clocks_->warps(), unit, by);
          earlier.warp != kNoWarp)
        return {Problem::kWritten, earlier, unit * grain_};
      note(reads_, clocks_->readers(), unit, by);
    }
    return {};
  }

  // A read by wgmma, which happens at some time from now on: until let_go() no thread may write.
  Conflict read_later(uint32_t offset, uint32_t bytes, const Accessor& by) const {
    for (uint32_t unit = offset / grain_; unit < (offset + bytes) / grain_; ++unit) {
      const Write& write = writes_[unit];
      if (is_early(write)) continue;
      if (write.state != kWritten) return not_written(unit);
      if (!races) continue;
      if (!ordered(write, by)) return {Problem::kWritten, write.by(), unit * grain_};
      if (!visible(write, by)) return {Problem::kUnfenced, write.by(), unit * grain_};
    }
    return {};
  }
  void hold(uint32_t piece, const Accessor& by) {
    Hold& hold = holds_[piece / kPiece];
    ++hold.count;
    ++held_;
    hold.by = by;
  }
  // The read has happened, and counts as one by `actor`.
  void let_go(uint32_t piece, uint32_t actor, uint32_t clock, uint32_t pc) {
    --holds_[piece / kPiece].count;
    --held_;
    for (uint32_t unit = piece / grain_; unit < (piece + kPiece) / grain_; ++unit)
      reads_[unit * clocks_->readers() + actor] = {clock, pc, 0, true};
  }

  Conflict write(uint32_t offset, uint32_t bytes, const Accessor& by, bool atomic = false) {
    return mark(offset, bytes, by, kWritten, atomic);
  }
  // No thread may use the destination of an asynchronous copy until the copy lands.
  Conflict start_copy(uint32_t offset, uint32_t bytes, const Accessor& by) {
    return mark(offset, bytes, by, kPending);
  }
  void land_copy(uint32_t offset, uint32_t bytes, const Accessor& by) {
    for (uint32_t unit = offset / grain_; unit < (offset + bytes) / grain_; ++unit)
      writes_[unit] = stamp(by, kWritten);
  }
  // The same for bulk copies, which write through the async proxy; what they wrote is seen by those
  // who have seen `clock` of the mbarrier.
  Conflict start_bulk_copy(uint32_t offset, uint32_t bytes, const Accessor& by) {
    for (uint32_t unit = offset / grain_; races && unit < (offset + bytes) / grain_; ++unit) {
      const Write& write = writes_[unit];
      if (write.state == kWritten && ordered(write, by) && !visible(write, by))
        return {Problem::kUnfenced, write.by(), unit * grain_};
    }
    return mark(offset, bytes, by, kPending);
  }
  void land_bulk_copy(uint32_t offset, uint32_t bytes, uint32_t actor, uint32_t clock,
                      uint32_t pc) {
    for (uint32_t unit = offset / grain_; unit < (offset + bytes) / grain_; ++unit)
      writes_[unit] = {clock, pc, static_cast<uint8_t>(actor), 0, kWritten};
  }

  // From here on the memory is an mbarrier, until end_barrier().
  Conflict start_barrier(uint32_t offset, uint32_t bytes, const Accessor& by) {
    return mark(offset, bytes, by, kBarrier);
  }
  void end_barrier(uint32_t offset, uint32_t bytes) {
    for (uint32_t unit = offset / grain_; unit < (offset + bytes) / grain_; ++unit)
      writes_[unit].state = kEmpty;
  }
  // Whether who uses an mbarrier comes after who initialised it; through the async proxy too.
  Conflict use_barrier(uint32_t offset, const Accessor& by) const {
    const Write& write = writes_[offset / grain_];
    if (!races || ordered(write, by)) return {};
    return {Problem::kWritten, write.by(), offset};
  }
  bool barrier_is_visible(uint32_t offset, const Accessor& by) const {
    return !races || visible(writes_[offset / grain_], by);
  }

 private:
  static constexpr uint32_t kNoWarp = ~0u, kPiece = 16;

  enum State : uint8_t { kEmpty, kWritten, kPending, kBarrier };
  // The last write that was not atomic.
  struct Write {
    uint32_t clock = 0, pc = 0;
    uint8_t actor = 0, lane = 0;
    State state = kEmpty;
    Accessor by() const { return {actor, lane, false, pc}; }
  };
  // The last read, or atomic operation, of an actor: of one lane, or of several since its clock
  // advanced.
  struct Touch {
    uint32_t clock = 0, pc = 0;
    uint8_t lane = 0;
    bool several = false;
  };
  // How many wgmma read a piece, and the last of these.
  struct Hold {
    uint32_t count = 0;
    Accessor by = {};
  };

  Write stamp(const Accessor& by, State state) const {
    return {clocks_->now(by.warp), by.pc, static_cast<uint8_t>(by.warp),
            static_cast<uint8_t>(by.lane), state};
  }
  Conflict not_written(uint32_t unit) const {
    const Write& write = writes_[unit];
    const Problem what = write.state == kEmpty     ? Problem::kEmpty
                         : write.state == kPending ? Problem::kPending
                                                   : Problem::kBarrier;
    return {what, write.by(), unit * grain_};
  }

  bool is_early(const Write& write) const { return early_use && write.state == kPending; }
  bool ordered(const Write& write, const Accessor& by) const {
    return clocks_->before(by, write.actor, write.lane, false, write.clock);
  }
  // Whether the async proxy sees it: its own writes, and others after a fence.
  bool visible(const Write& write, const Accessor& by) const {
    return write.actor >= clocks_->readers() ||
           clocks_->fenced(by, write.actor, write.lane, write.clock);
  }

  // `actors`: how many may touch a unit.
  void note(std::vector<Touch>& touches, uint32_t actors, uint32_t unit, const Accessor& by) {
    Touch& touch = touches[unit * actors + by.warp];
    // Lanes that nothing has ordered since count as several.
    const bool open = touch.clock >= clocks_->seen(by.warp)[by.warp];
    const bool several = by.whole_warp || (open && (touch.several || touch.lane != by.lane));
    touch = {clocks_->now(by.warp), by.pc, static_cast<uint8_t>(by.lane), several};
  }
  // Who touched a unit and is not ordered before what `by` does; its warp is kNoWarp if none.
  [[gnu::always_inline]] Accessor unordered(const std::vector<Touch>& touches, uint32_t actors,
                                            uint32_t unit, const Accessor& by) const {
    if (touches.empty()) return {kNoWarp, 0, false, 0};
    const uint32_t* const seen = clocks_->seen(by.warp);
    for (uint32_t actor = 0; actor < actors; ++actor) {
      const Touch& touch = touches[unit * actors + actor];
      if (touch.clock < seen[actor]) [[likely]]
        continue;
      if (clocks_->before(by, actor, touch.lane, touch.several, touch.clock)) continue;
      return {actor, touch.lane, touch.several, touch.pc};
    }
    return {kNoWarp, 0, false, 0};
  }

  Conflict mark(uint32_t offset, uint32_t bytes, const Accessor& by, State state,
                bool atomic = false) {
    if (atomic && atomics_.empty()) atomics_.resize(writes_.size() * clocks_->warps());
    for (uint32_t unit = offset / grain_; unit < (offset + bytes) / grain_; ++unit) {
      Write& write = writes_[unit];
      if ((write.state == kPending && !early_use) || write.state == kBarrier)
        return not_written(unit);
      if (races && !is_early(write)) {
        if (write.state != kEmpty && !ordered(write, by))
          return {Problem::kWritten, write.by(), unit * grain_};
        if (held_ != 0 && holds_[unit * grain_ / kPiece].count != 0)
          return {Problem::kHeld, holds_[unit * grain_ / kPiece].by, unit * grain_};
        if (const Accessor earlier = unordered(reads_, clocks_->readers(), unit, by);
            earlier.warp != kNoWarp)
          return {Problem::kRead, earlier, unit * grain_};
        const Accessor earlier = atomic ? Accessor{kNoWarp, 0, false, 0}
                                        : unordered(atomics_, clocks_->warps(), unit, by);
        if (earlier.warp != kNoWarp) return {Problem::kWritten, earlier, unit * grain_};
      }
      if (atomic) {
        write.state = kWritten;
        note(atomics_, clocks_->warps(), unit, by);
      } else {
        write = stamp(by, state);
      }
    }
    return {};
  }

  uint32_t bytes_ = 0, grain_ = 4;
  uint64_t held_ = 0;  // the sum of all holds' counts
  const Clocks* clocks_ = nullptr;
  std::vector<unsigned char> data_;
  std::vector<Write> writes_;
  std::vector<Touch> reads_;    // [unit, warp or warpgroup]
  std::vector<Touch> atomics_;  // [unit, warp]; none without atomic operations
  std::vector<Hold> holds_;     // of each 16 bytes
};

}  // namespace bert_unpad::ptx
