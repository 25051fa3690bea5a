// Which blocks touched each unit of global memory during a launch. What one of them writes no other
// may touch, unless both do so by atomic operations, or an atomic operation with .acq_rel orders
// them: what a warp has done, or has seen by barriers, before its own comes before what blocks do
// after theirs at the same address, if that is later.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "gpu_model/ptx/clocks.h"

namespace bert_unpad::ptx {

class GlobalAccesses {
 public:
  // Who does an access: a warp of a block, at that time of its clock.
  struct Who {
    uint32_t block, warp, clock;
  };

  // `grain`: the smallest access of the kernel, in bytes.
  void begin(uint32_t grain) {
    ++launch_;
    grain_ = grain;
    released_.clear();
    seen_.clear();
    if (pages_.size() > kMaxPages) {
      pages_.clear();
      last_ = nullptr;
    }
  }

  // An atomic operation with .acq_rel; `clocks`: what its warp has seen of its block's.
  void order(uint64_t address, uint32_t block, const std::vector<uint32_t>& clocks) {
    Seen& own = seen_[block];
    Seen& released = released_[address];
    for (const auto& [other, seen] : released) merge_clocks(own[other], seen);
    merge_clocks(own[block], clocks);
    for (const auto& [other, seen] : own) merge_clocks(released[other], seen);
  }

  // What another block did that an access of `by` conflicts with; null if there is nothing.
  const char* conflict(uint64_t address, uint32_t bytes, const Who& by, bool write, bool atomic) {
    const uint32_t block = by.block;
    for (uint64_t at = address; at < address + bytes; at += grain_) {
      Unit& unit = find(at);
      if (unit.launch != launch_) unit = {launch_, kNone, kNone, false, 0, 0};
      const bool ordered = unit.writer == kNone || unit.writer == block || comes_before(unit, by);
      if (!ordered && !(atomic && unit.atomic)) return "written";
      if (write && unit.reader != kNone && unit.reader != block) return "read";
      if (write) {
        unit.atomic = atomic && (unit.writer == kNone || unit.atomic);
        unit.writer = ordered ? block : kSeveral;
        unit.warp = by.warp;
        unit.clock = by.clock;
      } else {
        unit.reader = unit.reader == kNone || unit.reader == block ? block : kSeveral;
      }
    }
    return nullptr;
  }

  // Whether this launch has written any of it.
  bool written(uint64_t address, uint32_t bytes) {
    for (uint64_t at = address; at < address + bytes; at += grain_)
      if (const Unit& unit = find(at); unit.launch == launch_ && unit.writer != kNone) return true;
    return false;
  }

 private:
  static constexpr uint32_t kNone = ~0u, kSeveral = kNone - 1, kPageBytes = 4096;
  static constexpr size_t kMaxPages = 2048;

  struct Unit {
    uint32_t launch = 0, writer = kNone, reader = kNone;
    bool atomic = false;           // all writes were
    uint32_t warp = 0, clock = 0;  // of the last write
  };
  using Seen = std::unordered_map<uint32_t, std::vector<uint32_t>>;  // clocks, of blocks

  // Whether the last write, of another block, comes before what `by` does.
  bool comes_before(const Unit& unit, const Who& by) const {
    const auto own = seen_.find(by.block);
    if (own == seen_.end()) return false;
    const auto writer = own->second.find(unit.writer);
    return writer != own->second.end() && unit.clock < writer->second[unit.warp];
  }
  using Page = std::unique_ptr<Unit[]>;  // a unit per `grain_` bytes, room for single bytes

  Unit& find(uint64_t address) {
    const uint64_t number = address / kPageBytes;
    if (number != last_number_ || last_ == nullptr) {
      Page& page = pages_[number];
      if (!page) page = std::make_unique<Unit[]>(kPageBytes);
      last_ = page.get();
      last_number_ = number;
    }
    return last_[address % kPageBytes / grain_];
  }

  uint32_t launch_ = 0, grain_ = 1;
  uint64_t last_number_ = 0;
  Unit* last_ = nullptr;
  std::unordered_map<uint64_t, Page> pages_;
  std::unordered_map<uint64_t, Seen> released_;  // by address
  std::unordered_map<uint32_t, Seen> seen_;      // by block
};

}  // namespace bert_unpad::ptx
