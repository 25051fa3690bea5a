// A warp: its registers, and where its lanes are.
//
// Lanes that are at the same place go on together, as one group. After a branch that only some take
// there are several groups; the one that is furthest behind goes on, and groups that meet become
// one again. A group that comes to an operation of all lanes waits there for the others.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu_model/ptx/program.h"
#include "gpu_model/ptx/registers.h"
#include "gpu_model/ptx/wgmma_registers.h"

namespace bert_unpad::ptx {

struct Block;

// Asynchronous copy of a lane that has not landed.
struct PendingCopy {
  uint32_t offset, bytes, filled, lane, group, pc;  // zeros follow what is filled
  uint64_t number;                                  // of the warp's copies
  // Where the data still has to be read from; null if `data` has it.
  const void* source;
  unsigned char data[16];
};

struct Warp {
  enum class State : uint8_t {
    kReady,
    kAtBarrier,
    kPolling,      // has looked at an mbarrier in vain
    kAtWarpgroup,  // waits for wgmma that other warps have not come to
    kDone
  };

  Block* block = nullptr;
  const Kernel* kernel = nullptr;
  std::vector<unsigned char> memory;
  unsigned char* file = nullptr;
  uint32_t id = 0;
  uint32_t members = 0, live = 0;  // lanes that exist, and that have not exited
  uint32_t carry = 0;              // a bit per lane, of add.cc
  State state = State::kReady;
  uint32_t barrier = 0, barrier_pc = 0;  // where it waits
  uint32_t pc = 0, mask = 0;             // the group that runs
  std::vector<PendingCopy> copies;       // oldest first
  uint32_t copy_groups[kLanes] = {};     // committed so far
  uint64_t copy_count = 0;
  WgmmaRegisters wgmma_registers;
  // [of Kernel::wgmma_registers, lane]: sums that are in flight, where products are late.
  std::vector<float> late_sums;
  std::vector<unsigned char> local;  // [lane, local bytes]

  void start(Block* its_block, const Kernel& k, uint32_t number, uint32_t lanes);
  // Runs up to so many instructions, or until it waits or is done; returns how many are left.
  uint64_t run(uint64_t instructions);

  void branch(uint32_t target, uint32_t lanes);
  void exit(uint32_t lanes);

  template <class T>
  Source<T> in(uint32_t offset) const {
    return {file, offset};
  }
  uint32_t pred(uint32_t offset) const { return predicate(file, offset); }

  [[noreturn]] void fail(uint32_t at, int lane, const std::string& text) const;
  [[noreturn]] void fail(const Instruction& i, uint32_t lanes, const std::string& text) const {
    fail(static_cast<uint32_t>(&i - kernel->code.data()), std::countr_zero(lanes), text);
  }

 private:
  struct Group {
    uint32_t pc, mask;
    bool waiting;
  };

  // Fails if lanes that exit have not waited for what they started.
  void finish_asynchronous(uint32_t lanes);
  void regroup();
  // Makes the group that is furthest behind run; false if all of them wait.
  bool switch_group();
  // Whether all lanes that take part are here; if not, another group runs. Lanes whose masks differ
  // are groups of their own.
  bool assemble(const Instruction& i, uint32_t lanes);
  [[noreturn]] void fail_missing(uint32_t at, uint32_t have, uint32_t needed) const;
  void note_uses(const Instruction& i, uint32_t lanes);
  [[noreturn]] void fail_in_flight(const Instruction& i, uint32_t lanes, uint32_t number) const;
  void find_join() {
    join_ = ~0u;
    for (const Group& g : others_)
      if (!g.waiting) join_ = std::min(join_, g.pc);
  }
  // What a group does not know of itself: which lanes its collective needs.
  uint32_t needed_lanes(const Instruction& i, uint32_t lanes) const;
  // Those of `lanes` whose masks name the same lanes; fails if they do not name themselves.
  uint32_t same_members(const Instruction& i, uint32_t lanes, uint32_t needed) const;

  std::vector<Group> others_;
  uint32_t join_ = ~0u;  // the lowest place of another group that does not wait
};

inline void Warp::start(Block* its_block, const Kernel& k, uint32_t number, uint32_t lanes) {
  block = its_block;
  kernel = &k;
  id = number;
  members = live = mask = lanes;
  pc = 0;
  carry = 0;
  state = State::kReady;
  others_.clear();
  join_ = ~0u;
  copies.clear();
  copy_count = 0;
  wgmma_registers.reset(k.wgmma_registers.size());
  late_sums.resize(k.wgmma_registers.size() * kLanes);
  std::fill(std::begin(copy_groups), std::end(copy_groups), 0);
  memory.resize(k.image.size() + 64);
  file = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63);
  if (!k.image.empty()) std::memcpy(file, k.image.data(), k.image.size());
  local.assign(size_t{k.local_bytes} * kLanes, 0xff);
}

inline uint64_t Warp::run(uint64_t instructions) {
  const Instruction* const code = kernel->code.data();
  for (; instructions > 0; --instructions) {
    if (pc >= join_) regroup();
    const Instruction& i = code[pc];
    uint32_t lanes = mask;
    if (i.guard != kNoOffset) lanes &= pred(i.guard) ^ i.flip;
    if (i.uses_wgmma && lanes != 0) [[unlikely]]
      note_uses(i, lanes);
    if (i.kind == Kind::kPlain) {
      ++pc;
      if (lanes != 0) i.run(*this, i, lanes);
      continue;
    }
    if (lanes == 0) {
      ++pc;
      continue;
    }
    if (i.kind == Kind::kControl) {
      i.run(*this, i, lanes);
    } else if (assemble(i, lanes)) {
      ++pc;
      i.run(*this, i, mask);
    }
    if (state != State::kReady) return instructions - 1;
  }
  return 0;
}

inline void Warp::regroup() {
  if (join_ < pc) {
    others_.push_back({pc, mask, false});
    mask = 0;
    pc = join_;
  }
  std::erase_if(others_, [&](const Group& g) {
    if (g.waiting || g.pc != pc) return false;
    mask |= g.mask;
    return true;
  });
  find_join();
}

inline bool Warp::switch_group() {
  mask = 0;
  find_join();
  if (join_ == ~0u) return false;
  pc = join_;
  regroup();
  return true;
}

inline void Warp::branch(uint32_t target, uint32_t lanes) {
  const uint32_t rest = mask & ~lanes;
  if (rest == 0) {
    pc = target;
    return;
  }
  const uint32_t next = pc + 1;
  if (target == next) {
    pc = next;
    return;
  }
  const bool taken_first = target < next;
  others_.push_back(taken_first ? Group{next, rest, false} : Group{target, lanes, false});
  mask = taken_first ? lanes : rest;
  pc = taken_first ? target : next;
  find_join();
}

inline void Warp::exit(uint32_t lanes) {
  finish_asynchronous(lanes);
  live &= ~lanes;
  mask &= ~lanes;
  if (mask != 0) {
    ++pc;
  } else if (!switch_group()) {
    if (!others_.empty()) {
      const Group& g = others_.front();
      fail_missing(g.pc, g.mask, needed_lanes(kernel->code[g.pc], g.mask));
    }
    state = State::kDone;
  }
}

inline uint32_t Warp::needed_lanes(const Instruction& i, uint32_t lanes) const {
  if (i.members == kNoOffset) return members;
  return in<uint32_t>(i.members)[std::countr_zero(lanes)];
}

inline uint32_t Warp::same_members(const Instruction& i, uint32_t lanes, uint32_t needed) const {
  if (i.members == kNoOffset) return lanes;
  const auto masks = in<uint32_t>(i.members);
  lanes &= lane_bits([&](int l) { return masks[l] == needed; });
  if ((lanes & ~needed) != 0) fail(i, lanes & ~needed, "the mask of a lane does not name the lane");
  return lanes;
}

inline bool Warp::assemble(const Instruction& i, uint32_t lanes) {
  if (lanes != mask) {  // those whose guard is false go on
    others_.push_back({pc + 1, mask & ~lanes, false});
    mask = lanes;
    find_join();
  }
  const uint32_t needed = needed_lanes(i, mask);
  if (const uint32_t same = same_members(i, mask, needed); same != mask) {
    others_.push_back({pc, mask & ~same, false});  // comes here again
    mask = same;
    find_join();
  }
  const auto joins = [&](const Group& g) {
    return g.waiting && g.pc == pc && needed_lanes(i, g.mask) == needed;
  };
  uint32_t have = mask;
  for (const Group& g : others_)
    if (joins(g)) have |= g.mask;
  if ((needed & ~have) == 0) {
    std::erase_if(others_, joins);
    mask = have;
    return true;
  }
  others_.push_back({pc, mask, true});
  const uint32_t at = pc;
  if ((needed & ~live) != 0 || !switch_group()) fail_missing(at, have, needed);
  return false;
}

}  // namespace bert_unpad::ptx
