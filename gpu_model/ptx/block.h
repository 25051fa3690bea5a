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
#include "gpu_model/ptx/mbarrier.h"
#include "gpu_model/ptx/pending.h"
#include "gpu_model/ptx/shared_memory.h"
#include "gpu_model/ptx/warp.h"
#include "gpu_model/ptx/warpgroup.h"

namespace bert_unpad::ptx {

using block_model::Buffers;
using block_model::CompiledLaunch;
using block_model::Policy;

// When asynchronous copies land and wgmma writes its sums: when the seed says, or late: at the wait
// for them, bulk copies when nothing else can go on; until then destination and sums are NaN.
// kUnchecked: late, and only that NaN shows what is used too early; races are no fault either.
enum class Timing : uint8_t { kSeeded, kLate, kUnchecked };

inline std::string triple(uint64_t x, uint64_t y, uint64_t z) {
  return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}

struct Block {
  static constexpr uint32_t kBarriers = 16;
  // A block that takes more instructions than this loops without end.
  static constexpr uint64_t kMaxInstructions = uint64_t{1} << 32;
  // So often all warps look at mbarriers in vain before they are taken to wait for ever.
  static constexpr uint32_t kMaxPolls = 1000;

  const Kernel* kernel = nullptr;
  const CompiledLaunch* launch = nullptr;
  Timing timing = Timing::kSeeded;
  Buffers* constants = nullptr;  // the module's own data in global memory
  std::vector<unsigned char> parameters;
  unsigned index[3] = {};
  uint32_t number = 0;                 // within the grid
  GlobalAccesses* accesses = nullptr;  // of all blocks; null where there is nothing to compare
  SharedMemory shared;
  Clocks clocks;
  block_model::Random random;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  MBarriers mbarriers;
  PendingWork pending;

  void run();
  // A warp comes to a barrier of `threads` threads, 0: of all; it may go on at once if it only
  // arrives.
  void arrive(Warp& warp, const Instruction& i, uint32_t number, uint32_t threads, bool waits);

  bool is_late() const { return timing != Timing::kSeeded; }
  bool is_checked() const { return timing != Timing::kUnchecked; }
  // Whether something happens early, where that is open.
  bool draw_early() { return !is_late() && (random.next() & 1) != 0; }

  // Lets warps that wait for something go on, after which they look again.
  void wake(Warp::State waiting);
  // After a phase of an mbarrier may have completed, in a change of it that gave `problem`.
  void finish_mbarrier(Warp& warp, uint32_t pc, uint32_t lanes, const std::string& problem) {
    if (!problem.empty()) warp.fail(pc, std::countr_zero(lanes), problem);
    polls_ = 0;
    wake(Warp::State::kPolling);
  }

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
    View seen;  // by those who have arrived

    void reset() {
      arrived = waiting = expected = 0;
      seen.clear();
    }
  };

  void fill_specials(Warp& warp) const;
  uint32_t special(Special kind, const Warp& warp, int lane) const;
  // What goes on when no warp can: something that was left to later, or another look at mbarriers.
  bool go_on();
  std::string waits_at(const Warp& warp) const;
  [[noreturn]] void fail_stuck() const;

  Barrier barriers_[kBarriers];
  uint32_t ready_ = 0, polls_ = 0;
};

inline void Warp::fail(uint32_t at, int lane, const std::string& text) const {
  const unsigned* b = block->index;
  throw std::runtime_error(std::string(block->launch->op) + ": block " + triple(b[0], b[1], b[2]) +
                           ", " + block->thread_name(id, static_cast<uint32_t>(lane)) + " (warp " +
                           std::to_string(id) + ", lane " + std::to_string(lane) + "), " +
                           block->where(at) + ", kernel " + kernel->name + ": " + text);
}

inline void Warp::note_uses(const Instruction& i, uint32_t lanes) {
  const auto at = static_cast<uint32_t>(&i - kernel->code.data());
  for (uint32_t n = i.uses_begin; n < i.uses_end; ++n)
    if (!wgmma_registers.touch(kernel->uses[n], at) && block->is_checked())
      fail_in_flight(i, lanes, kernel->uses[n]);
}

inline void Warp::fail_in_flight(const Instruction& i, uint32_t lanes, uint32_t number) const {
  fail(i, lanes,
       "uses register " + kernel->wgmma_registers[number].name + " of the wgmma at " +
           block->where(wgmma_registers.flight_pc(number)) +
           ", for which no wgmma.wait_group has waited");
}

inline void Warp::finish_asynchronous(uint32_t lanes) {
  block->pending.finish_copies(*block, id, lanes);
  if (!block->is_checked()) return;
  for (const PendingCopy& copy : copies)
    if ((lanes >> copy.lane & 1) != 0)
      fail(copy.pc, static_cast<int>(copy.lane), "an asynchronous copy is never waited for");
  if (id / Warpgroup::kWarps >= block->warpgroups.size()) return;
  const Warpgroup& group = block->warpgroups[id / Warpgroup::kWarps];
  if (const WgmmaOperation* oldest = group.not_waited_for(id % Warpgroup::kWarps))
    fail(oldest->pc, std::countr_zero(lanes), "a wgmma is never waited for");
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
  const uint32_t groups = kernel->wgmma.empty() ? 0 : count / Warpgroup::kWarps;
  clocks.reset(count, groups);
  shared.reset(kernel->static_shared_bytes + launch->shared_bytes, kernel->grain, clocks);
  shared.early_use = !is_checked();
  warps.resize(count);
  warpgroups.assign(groups, Warpgroup{});
  mbarriers.reset();
  pending.clear();
  ready_ = polls_ = 0;
  for (Barrier& barrier : barriers_) barrier.reset();
  for (uint32_t w = 0; w < count; ++w) {
    const uint32_t left = threads - w * kLanes;
    warps[w].start(this, *kernel, w, left >= kLanes ? kAllLanes : (1u << left) - 1);
    fill_specials(warps[w]);
    ready_ |= 1u << w;
  }
  const auto policy = static_cast<Policy>(launch->policy);
  const Warp* last = nullptr;
  uint64_t budget = kMaxInstructions;
  for (;;) {
    pending.run_early(*this);
    if (ready_ == 0) {
      if (!go_on()) break;
      continue;
    }
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
  for (const Warpgroup& group : warpgroups)
    if (const auto late = group.late_warp(); late != Warpgroup::kWarps) {
      const uint32_t first = static_cast<uint32_t>(&group - warpgroups.data()) * Warpgroup::kWarps;
      warps[first + late].fail(group.next_step(late).pc, 0,
                               "this warp exits, but others of its warpgroup come here");
    }
  mbarriers.for_each([&](uint32_t, const MBarrier& barrier) {
    const Accessor& by = barrier.copy_by;
    if (barrier.has_unseen_copy() && is_checked())
      warps[by.warp].fail(by.pc, static_cast<int>(by.lane), "a bulk copy is never waited for");
  });
}

inline bool Block::go_on() {
  if (pending.run_any(*this)) {
    polls_ = 0;
    return true;
  }
  if (++polls_ > kMaxPolls) return false;
  wake(Warp::State::kPolling);
  return ready_ != 0;
}

inline void Block::wake(Warp::State waiting) {
  for (Warp& warp : warps)
    if (warp.state == waiting) {
      warp.state = Warp::State::kReady;
      ready_ |= 1u << warp.id;
    }
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
    barrier.reset();
    polls_ = 0;
  } else if (waits) {
    warp.state = Warp::State::kAtBarrier;
    warp.barrier = number;
    warp.barrier_pc = static_cast<uint32_t>(&i - kernel->code.data());
  }
}

inline std::string Block::waits_at(const Warp& warp) const {
  if (warp.state == Warp::State::kDone) return "has exited";
  const std::string at = where(warp.barrier_pc);
  switch (warp.state) {
    case Warp::State::kAtBarrier:
      return "waits in sync_block at " + at + ", barrier " + std::to_string(warp.barrier);
    case Warp::State::kPolling:
      return "waits for an mbarrier at " + at;
    default:
      return "waits in wgmma.wait_group at " + at;
  }
}

inline void Block::fail_stuck() const {
  const Warp* stuck = nullptr;
  std::string others;
  for (const Warp& warp : warps) {
    if (warp.state != Warp::State::kDone && stuck == nullptr)
      stuck = &warp;
    else
      others += "; warp " + std::to_string(warp.id) + " " + waits_at(warp);
  }
  const std::string why = stuck->state == Warp::State::kAtBarrier
                              ? "sync_block at barrier " + std::to_string(stuck->barrier) +
                                    ", to which others never come"
                          : stuck->state == Warp::State::kPolling
                              ? "waits for a phase of an mbarrier that never completes"
                              : "waits for wgmma to which other warps of the warpgroup never come";
  stuck->fail(stuck->barrier_pc, std::countr_zero(stuck->live), why + others);
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
