// One thread block: which warp runs, barriers, and what its threads can reach.
//
// The policies are those of the model of a block:
//   kInOrder    the first warp that can, until it waits;
//   kUniform    any warp, for a few instructions: warps stay about level;
//   kWarpFirst  a warp chosen at random, for as long as it can: it runs far ahead of the others,
//               which shows writes that come too early.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpu_model/block/compiled.h"
#include "gpu_model/block/random.h"
#include "gpu_model/ptx/global_accesses.h"
#include "gpu_model/ptx/shared_memory.h"
#include "gpu_model/ptx/warp.h"

namespace bert_unpad::ptx {

using block_model::Buffers;
using block_model::CompiledLaunch;
using block_model::Policy;

inline std::string triple(uint64_t x, uint64_t y, uint64_t z) {
  return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}

struct Block {
  static constexpr uint32_t kBarriers = 16;
  // A block that takes more instructions than this loops without end.
  static constexpr uint64_t kMaxInstructions = uint64_t{1} << 32;

  const Kernel* kernel = nullptr;
  const CompiledLaunch* launch = nullptr;
  Buffers* constants = nullptr;  // the module's own data in global memory
  std::vector<unsigned char> parameters;
  unsigned index[3] = {};
  uint32_t number = 0;                 // within the grid
  GlobalAccesses* accesses = nullptr;  // of all blocks; null where there is nothing to compare
  SharedMemory shared;
  Clocks clocks;
  block_model::Random random;
  std::vector<Warp> warps;

  void run();
  // A warp comes to a barrier of `threads` threads, 0: of all; it may go on at once if it only
  // arrives.
  void arrive(Warp& warp, const Instruction& i, uint32_t number, uint32_t threads, bool waits);

  // Counts a barrier or wait; false where a test takes it out.
  bool pass(const char* kind, const Warp& warp, const Instruction& i) const {
    const Place& place = kernel->places[i.place];
    return launch->pass_site(kind, place.file, i.place == 0 ? i.line : place.line,
                             std::popcount(warp.mask));
  }
  std::string where(uint32_t pc) const {
    const Instruction& i = kernel->code[pc];
    const Place& place = kernel->places[i.place];
    std::string text = "line " + std::to_string(i.line) + " of its PTX";
    if (i.place != 0)
      text = std::string(place.file) + ":" + std::to_string(place.line) + ", " + text;
    return text;
  }
  std::string thread_name(uint32_t warp, uint32_t lane) const {
    const uint64_t id = warp * kLanes + lane;
    const unsigned* shape = launch->block;
    return "thread " +
           triple(id % shape[0], id / shape[0] % shape[1], id / (uint64_t{shape[0]} * shape[1]));
  }

 private:
  struct Barrier {
    uint32_t arrived = 0, waiting = 0, expected = 0;
    std::vector<uint32_t> seen;  // of the warps' clocks
  };

  void fill_specials(Warp& warp) const;
  uint32_t special(Special kind, const Warp& warp, int lane) const;
  [[noreturn]] void fail_stuck() const;

  Barrier barriers_[kBarriers];
  uint32_t ready_ = 0;
};

inline void Warp::fail(uint32_t at, int lane, const std::string& text) const {
  const unsigned* b = block->index;
  throw std::runtime_error(std::string(block->launch->op) + ": block " + triple(b[0], b[1], b[2]) +
                           ", " + block->thread_name(id, static_cast<uint32_t>(lane)) + " (warp " +
                           std::to_string(id) + ", lane " + std::to_string(lane) + "), " +
                           block->where(at) + ", kernel " + kernel->name + ": " + text);
}

inline void Warp::fail_missing(uint32_t at, uint32_t have, uint32_t needed) const {
  const auto missing = needed & ~have;
  const int lane = std::countr_zero(missing);
  std::string why = "lane " + std::to_string(lane) + " of this warp ";
  if ((members >> lane & 1) == 0) {
    why = "the block's last warp has less than 32 threads";
  } else if ((live >> lane & 1) == 0) {
    why += "has exited";
  } else {
    for (const Group& g : others_)
      if ((g.mask >> lane & 1) != 0) why += "waits at " + block->where(g.pc);
    if ((mask >> lane & 1) != 0) why += "is at " + block->where(pc);
  }
  fail(at, std::countr_zero(have), "an operation of all lanes, but " + why);
}

inline void Block::run() {
  const unsigned* shape = launch->block;
  const uint32_t threads = shape[0] * shape[1] * shape[2];
  const uint32_t count = (threads + kLanes - 1) / kLanes;
  clocks.reset(count);
  shared.reset(kernel->static_shared_bytes + launch->shared_bytes, kernel->grain, clocks);
  warps.resize(count);
  ready_ = 0;
  for (Barrier& barrier : barriers_) barrier = {};
  for (uint32_t w = 0; w < count; ++w) {
    const uint32_t left = threads - w * kLanes;
    warps[w].start(this, *kernel, w, left >= kLanes ? kAllLanes : (1u << left) - 1);
    fill_specials(warps[w]);
    ready_ |= 1u << w;
  }
  const auto policy = static_cast<Policy>(launch->policy);
  const Warp* last = nullptr;
  uint64_t budget = kMaxInstructions;
  while (ready_ != 0) {
    const unsigned number = policy == Policy::kInOrder
                                ? static_cast<unsigned>(std::countr_zero(ready_))
                                : random.bit_of(ready_);
    Warp& warp = warps[number];
    launch->statistics->switches += &warp != last;
    last = &warp;
    const uint64_t slice =
        policy == Policy::kUniform ? std::min(budget, 1 + random.next() % 64) : budget;
    budget -= slice - warp.run(slice);
    if (budget == 0)
      warp.fail(warp.pc, std::countr_zero(warp.mask),
                std::to_string(kMaxInstructions) + " instructions: a loop without end");
    if (warp.state != Warp::State::kReady) ready_ &= ~(1u << number);
  }
  for (const Warp& warp : warps)
    if (warp.state != Warp::State::kDone) fail_stuck();
}

inline void Block::arrive(Warp& warp, const Instruction& i, uint32_t number, uint32_t threads,
                          bool waits) {
  if (number >= kBarriers) warp.fail(i, warp.mask, "barrier " + std::to_string(number) + " of 16");
  if (threads % kLanes != 0)
    warp.fail(i, warp.mask,
              "a barrier of " + std::to_string(threads) + " threads, which is no multiple of 32");
  Barrier& barrier = barriers_[number];
  const uint32_t expected = threads == 0 ? static_cast<uint32_t>(warps.size()) : threads / kLanes;
  if (barrier.arrived != 0 && barrier.expected != expected)
    warp.fail(i, warp.mask,
              "barrier " + std::to_string(number) + " of " + std::to_string(expected) +
                  " warps, but others wait for " + std::to_string(barrier.expected));
  const uint32_t bit = 1u << warp.id;
  if ((barrier.arrived & bit) != 0)
    warp.fail(i, warp.mask, "this warp arrives at barrier " + std::to_string(number) + " twice");
  barrier.expected = expected;
  barrier.arrived |= bit;
  if (waits) barrier.waiting |= bit;
  clocks.leave(warp.id, barrier.seen);
  if (static_cast<uint32_t>(std::popcount(barrier.arrived)) == expected) {
    for_lanes(barrier.waiting, [&](int w) {
      clocks.enter(static_cast<uint32_t>(w), barrier.seen);
      warps[static_cast<size_t>(w)].state = Warp::State::kReady;
      ready_ |= 1u << w;
    });
    barrier = {};
  } else if (waits) {
    warp.state = Warp::State::kAtBarrier;
    warp.barrier = number;
    warp.barrier_pc = static_cast<uint32_t>(&i - kernel->code.data());
  }
}

inline void Block::fail_stuck() const {
  const Warp* stuck = nullptr;
  std::string others;
  for (const Warp& warp : warps) {
    if (warp.state == Warp::State::kAtBarrier && stuck == nullptr) {
      stuck = &warp;
      continue;
    }
    others +=
        "; warp " + std::to_string(warp.id) +
        (warp.state == Warp::State::kDone ? " has exited"
                                          : " waits in sync_block at " + where(warp.barrier_pc) +
                                                ", barrier " + std::to_string(warp.barrier));
  }
  stuck->fail(stuck->barrier_pc, std::countr_zero(stuck->live),
              "sync_block at barrier " + std::to_string(stuck->barrier) +
                  ", to which others never come" + others);
}

inline uint32_t Block::special(Special kind, const Warp& warp, int lane) const {
  const unsigned* shape = launch->block;
  const uint32_t id = warp.id * kLanes + static_cast<uint32_t>(lane);
  const uint32_t bit = 1u << lane;
  switch (kind) {
    case Special::kTidX:
      return id % shape[0];
    case Special::kTidY:
      return id / shape[0] % shape[1];
    case Special::kTidZ:
      return id / (shape[0] * shape[1]);
    case Special::kNtidX:
    case Special::kNtidY:
    case Special::kNtidZ:
      return shape[static_cast<int>(kind) - static_cast<int>(Special::kNtidX)];
    case Special::kCtaidX:
    case Special::kCtaidY:
    case Special::kCtaidZ:
      return index[static_cast<int>(kind) - static_cast<int>(Special::kCtaidX)];
    case Special::kNctaidX:
    case Special::kNctaidY:
    case Special::kNctaidZ:
      return launch->grid[static_cast<int>(kind) - static_cast<int>(Special::kNctaidX)];
    case Special::kLaneId:
      return static_cast<uint32_t>(lane);
    case Special::kWarpId:
      return warp.id;
    case Special::kNwarpId:
      return static_cast<uint32_t>(warps.size());
    case Special::kLanemaskEq:
      return bit;
    case Special::kLanemaskLt:
      return bit - 1;
    case Special::kLanemaskLe:
      return bit | (bit - 1);
    case Special::kLanemaskGt:
      return ~(bit | (bit - 1));
    case Special::kLanemaskGe:
      return ~(bit - 1);
    case Special::kDynamicSharedBytes:
      return launch->shared_bytes;
    case Special::kTotalSharedBytes:
      return launch->shared_bytes + kernel->static_shared_bytes;
  }
  return 0;
}

inline void Block::fill_specials(Warp& warp) const {
  for (const auto& one : kernel->specials)
    write_lanes<uint32_t>(warp.file, one.offset, kAllLanes,
                          [&](int l) { return special(one.kind, warp, l); });
}

}  // namespace bert_unpad::ptx
