// Which blocks touched each unit of global memory during a launch. Nothing orders blocks, so what
// one of them writes no other may touch, unless both do so by atomic operations.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>

namespace bert_unpad::ptx {

class GlobalAccesses {
 public:
  // `grain`: the smallest access of the kernel, in bytes.
  void begin(uint32_t grain) {
    ++launch_;
    grain_ = grain;
    if (pages_.size() > kMaxPages) {
      pages_.clear();
      last_ = nullptr;
    }
  }

  // What another block did that an access of `block` conflicts with; null if there is nothing.
  const char* conflict(uint64_t address, uint32_t bytes, uint32_t block, bool write, bool atomic) {
    for (uint64_t at = address; at < address + bytes; at += grain_) {
      Unit& unit = find(at);
      if (unit.launch != launch_) unit = {launch_, kNone, kNone, false};
      if (unit.writer != kNone && unit.writer != block && !(atomic && unit.atomic))
        return "written";
      if (write && unit.reader != kNone && unit.reader != block) return "read";
      if (write) {
        const bool first = unit.writer == kNone;
        unit.writer = first || unit.writer == block ? block : kSeveral;
        unit.atomic = atomic && (first || unit.atomic);
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
    bool atomic = false;  // all writes were
  };
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
};

}  // namespace bert_unpad::ptx
