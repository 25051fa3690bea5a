// A block's shared memory, and who touched each unit of it last.
//
// Two accesses of different threads, one of them a write, are a race unless something orders them:
// a barrier that both warps pass in between, or within a warp bar.warp.sync. Each warp has a clock,
// which its barriers advance, and remembers how far it has seen the clocks of the others (vector
// clocks). An access is stamped with its warp's clock: what another warp has not yet seen is not
// ordered before what that does now. So the check does not depend on the schedule that was run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gpu_model/ptx/registers.h"

namespace bert_unpad::ptx {

// Who does an access: one lane, or its whole warp (of ldmatrix).
struct Accessor {
  uint32_t warp, lane;
  bool whole_warp;
  uint32_t pc;
};

class Clocks {
 public:
  void reset(uint32_t warps) {
    warps_ = warps;
    now_.assign(warps, 1);
    seen_.assign(size_t{warps} * warps, 1);
  }
  uint32_t warps() const { return warps_; }
  uint32_t now(uint32_t warp) const { return now_[warp]; }
  // Accesses of `other` with a smaller clock happened before what `warp` does now; with `other` the
  // warp itself, those of all its lanes.
  uint32_t seen(uint32_t warp, uint32_t other) const { return seen_[warp * warps_ + other]; }

  // The lanes of a warp wait for each other.
  void sync(uint32_t warp) { seen_[warp * warps_ + warp] = ++now_[warp]; }
  // What a warp did so far, and had seen, is passed on by a barrier at which it arrives, ...
  void leave(uint32_t warp, std::vector<uint32_t>& barrier) {
    ++now_[warp];
    barrier.resize(warps_);
    for (uint32_t w = 0; w < warps_; ++w)
      barrier[w] = std::max(barrier[w], w == warp ? now_[warp] : seen(warp, w));
  }
  // ... to the warps that wait there.
  void enter(uint32_t warp, const std::vector<uint32_t>& barrier) {
    for (uint32_t w = 0; w < warps_; ++w) {
      uint32_t& own = seen_[warp * warps_ + w];
      own = std::max(own, barrier[w]);
    }
  }

 private:
  uint32_t warps_ = 0;
  std::vector<uint32_t> now_, seen_;
};

class SharedMemory {
 public:
  bool races = true;

  void reset(uint32_t bytes, uint32_t grain, const Clocks& clocks) {
    bytes_ = bytes;
    grain_ = grain;
    clocks_ = &clocks;
    // All bits set is NaN in every floating-point type.
    data_.assign((bytes + 15) / 16 * 16, 0xff);
    writes_.assign(data_.size() / grain, Write{});
    reads_.assign(writes_.size() * clocks.warps(), Touch{});
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
  bool in_range(uint64_t offset, uint32_t bytes) const {
    return offset % bytes == 0 && offset < bytes_ && bytes_ - offset >= bytes;
  }

  struct Conflict {
    const char* what = nullptr;  // null: none
    Accessor earlier = {};
    uint32_t offset = 0;
  };

  Conflict read(uint32_t offset, uint32_t bytes, const Accessor& by) {
    for (uint32_t unit = offset / grain_; unit < (offset + bytes) / grain_; ++unit) {
      const Write& write = writes_[unit];
      if (write.state == kEmpty) return {"never written", {}, unit * grain_};
      if (write.state == kPending) return {"pending", write.by(), unit * grain_};
      if (!races) continue;
      if (!ordered(write, by)) return {"written", write.by(), unit * grain_};
      if (const Accessor earlier = unordered(atomics_, unit, by); earlier.warp != kNoWarp)
        return {"written", earlier, unit * grain_};
      note(reads_, unit, by);
    }
    return {};
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

 private:
  static constexpr uint32_t kNoWarp = ~0u;

  enum State : uint8_t { kEmpty, kWritten, kPending };
  // The last write that was not atomic.
  struct Write {
    uint32_t clock = 0, pc = 0;
    uint8_t warp = 0, lane = 0;
    State state = kEmpty;
    Accessor by() const { return {warp, lane, false, pc}; }
  };
  // The last read, or atomic operation, of a warp: of one lane, or of several since its clock
  // advanced.
  struct Touch {
    uint32_t clock = 0, pc = 0;
    uint8_t lane = 0;
    bool several = false;
  };

  Write stamp(const Accessor& by, State state) const {
    return {clocks_->now(by.warp), by.pc, static_cast<uint8_t>(by.warp),
            static_cast<uint8_t>(by.lane), state};
  }

  bool ordered(const Write& write, const Accessor& by) const {
    if (write.clock < clocks_->seen(by.warp, write.warp)) return true;
    return write.warp == by.warp && write.lane == by.lane && !by.whole_warp;
  }

  void note(std::vector<Touch>& touches, uint32_t unit, const Accessor& by) {
    Touch& touch = touches[unit * clocks_->warps() + by.warp];
    // Lanes that nothing has ordered since count as several.
    const bool open = touch.clock >= clocks_->seen(by.warp, by.warp);
    const bool several = by.whole_warp || (open && (touch.several || touch.lane != by.lane));
    touch = {clocks_->now(by.warp), by.pc, static_cast<uint8_t>(by.lane), several};
  }
  // Who touched a unit and is not ordered before what `by` does; its warp is kNoWarp if nobody.
  Accessor unordered(const std::vector<Touch>& touches, uint32_t unit, const Accessor& by) const {
    const uint32_t warps = touches.empty() ? 0 : clocks_->warps();
    for (uint32_t w = 0; w < warps; ++w) {
      const Touch& touch = touches[unit * warps + w];
      if (touch.clock < clocks_->seen(by.warp, w)) continue;
      if (w == by.warp && touch.lane == by.lane && !touch.several && !by.whole_warp) continue;
      return {w, touch.lane, touch.several, touch.pc};
    }
    return {kNoWarp, 0, false, 0};
  }

  Conflict mark(uint32_t offset, uint32_t bytes, const Accessor& by, State state,
                bool atomic = false) {
    if (atomic && atomics_.empty()) atomics_.resize(reads_.size());
    for (uint32_t unit = offset / grain_; unit < (offset + bytes) / grain_; ++unit) {
      Write& write = writes_[unit];
      if (write.state == kPending) return {"pending", write.by(), unit * grain_};
      if (races) {
        if (write.state != kEmpty && !ordered(write, by))
          return {"written", write.by(), unit * grain_};
        if (const Accessor earlier = unordered(reads_, unit, by); earlier.warp != kNoWarp)
          return {"read", earlier, unit * grain_};
        const Accessor earlier = atomic ? Accessor{kNoWarp} : unordered(atomics_, unit, by);
        if (earlier.warp != kNoWarp) return {"written", earlier, unit * grain_};
      }
      if (atomic) {
        write.state = kWritten;
        note(atomics_, unit, by);
      } else {
        write = stamp(by, state);
      }
    }
    return {};
  }

  uint32_t bytes_ = 0, grain_ = 4;
  const Clocks* clocks_ = nullptr;
  std::vector<unsigned char> data_;
  std::vector<Write> writes_;
  std::vector<Touch> reads_, atomics_;  // [unit, warp]; none without atomic operations
};

}  // namespace bert_unpad::ptx
