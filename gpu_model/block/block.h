// The threads of one block: one fiber each, run one at a time, and what makes them wait for each
// other.
//
// A thread runs until it comes to something that other threads take part in. The policy says who
// goes on then:
//   kInOrder    the first that can, so a run is easy to follow;
//   kUniform    any warp, any lane: warps stay about level;
//   kWarpFirst  one warp, chosen at random, for as long as it can: it runs far ahead of the others,
//               which shows writes that come too early.
// The rules are stricter than a GPU's, so that what passes here is defined there: every lane of a
// warp takes part in every warp-wide operation, every thread of the block in every barrier, and all
// come to it from the same place in the source.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>

#include "gpu_model/block/copies.h"
#include "gpu_model/block/fiber.h"
#include "gpu_model/block/products.h"
#include "gpu_model/block/random.h"
#include "gpu_model/block/site.h"

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace bert_unpad::block_model {

inline constexpr unsigned kWarpSize = 32, kMaxThreads = 1024;
inline constexpr unsigned kGroupWarps = 4, kGroupSize = kGroupWarps * kWarpSize;  // a warpgroup's

// A thread's last fence_shared: of what it wrote before `tick`.
struct Fence {
  uint32_t tick = 0, epoch = 0;
};

struct Thread {
  Fiber fiber;
  uint3 index;
  unsigned id = 0;  // within the block
  PendingCopies copies;
  Fence fence, earlier_fence;  // the latter before the block's barrier that preceded the former

  unsigned warp() const { return id / kWarpSize; }
  unsigned lane() const { return id % kWarpSize; }
};

struct Warp {
  uint32_t members = 0;  // lanes that exist
  uint32_t ready = 0, arrived = 0, at_barrier = 0, exited = 0;
  const char* operation = nullptr;  // where the `arrived` lanes wait
  Site site;
  void* lanes[kWarpSize];  // what they brought
  uint32_t epoch = 0;      // value of Block::clock at the last barrier of the warp or the block
};

class Block {
 public:
  Policy policy = Policy::kInOrder;
  Random random;
  Thread* self = nullptr;  // who runs
  int64_t switches = 0;
  // Barriers of any kind so far. What a thread does is ordered after what another one did if a
  // barrier of both lies between.
  uint32_t clock = 1;
  uint32_t epoch = 1;  // value of `clock` at the block's last barrier
  uint32_t tick = 0;   // writes of shared memory so far

  uint32_t warp_epoch() const { return warps_[self->warp()].epoch; }

  // Runs body(argument) in every thread of a block; throws what the first failing thread threw.
  void run(const char* name, dim3 shape, void (*body)(void*), void* argument);

  // Ends the launch. The message names the block, the thread, and the place.
  [[noreturn]] void fail(const Site& site, const std::string& text, const Thread* thread);
  [[noreturn]] void fail(const Site& site, const std::string& text) { fail(site, text, self); }

  void barrier(const Site& site);

  // All lanes of a warp bring a `Lane`; the last to come calls perform(Lane* lanes[32]).
  template <class Lane, class F>
  void collective(const char* operation, const Site& site, Lane& mine, const F& perform);

  // The same for the threads of a warpgroup: perform(Lane* lanes[128]).
  template <class Lane, class F>
  void group_collective(const char* operation, const Site& site, Lane& mine, const F& perform);

  // Whether what `thread` wrote at `tick` can be read by wgmma: it fenced, and a barrier followed.
  bool fenced(const Thread& thread, uint32_t at) const {
    return at < (thread.fence.epoch < epoch ? thread.fence : thread.earlier_fence).tick;
  }
  void fence() {
    if (self->fence.epoch < epoch) self->earlier_fence = self->fence;
    self->fence = {++tick, epoch};
  }

  // Orders what the lanes of this warp did before with what they do after.
  void advance_warp() { warps_[self->warp()].epoch = ++clock; }

  const Thread& thread(unsigned id) const { return threads_[id]; }
  PendingProducts& products() { return products_[self->id / kGroupSize]; }  // of its warpgroup

 private:
  static void enter();
  [[noreturn]] void refuse(const Warp& warp, const char* operation, const Site& site);
  // A warp with lanes that wait for those of this warp: itself, or another of its warpgroup.
  const Warp* waiting_group(unsigned warp) const {
    const unsigned group = warp / kGroupWarps;
    if (warps_[warp].arrived != 0) return &warps_[warp];
    if (group_arrived_[group] == 0) return nullptr;
    return &warps_[group * kGroupWarps + std::countr_zero(group_arrived_[group])];
  }
  // Joins the lanes of this warp that wait; refuses where not all can come.
  Warp& arrive(const char* operation, const Site& site, void* mine);
  void exit_thread();
  Thread* pick();
  void yield();
  void make_ready(unsigned warp, uint32_t lanes) {
    warps_[warp].ready = lanes;
    ready_warps_ |= 1u << warp;
  }
  // "lane 3 waits at file:line (operation)" for one of `lanes`.
  std::string describe(const Warp& warp, uint32_t lanes, const char* what) const;

  const char* name_ = "";
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  unsigned count_ = 0, waiting_ = 0, exited_ = 0, warp_ = 0;
  uint32_t ready_warps_ = 0;
  Site barrier_;
  Stacks stacks_;
  std::unique_ptr<Thread[]> threads_ = std::make_unique<Thread[]>(kMaxThreads);
  Warp warps_[kMaxThreads / kWarpSize];
  uint32_t group_arrived_[kMaxThreads / kGroupSize];  // warps of which all lanes have come
  PendingProducts products_[kMaxThreads / kGroupSize];
  Fiber main_;
  std::string error_;
};

inline Block block;

inline std::string triple(unsigned x, unsigned y, unsigned z) {
  return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}

inline void Block::fail(const Site& site, const std::string& text, const Thread* thread) {
  // Outside of a kernel: what a product of cuBLASLt was given.
  if (thread == nullptr) throw std::runtime_error(text);
  const uint3& t = thread->index;
  throw std::runtime_error(std::string(name_) + ": block " +
                           triple(blockIdx.x, blockIdx.y, blockIdx.z) + ", thread " +
                           triple(t.x, t.y, t.z) + ", " + place(site) + ": " + text);
}

inline std::string Block::describe(const Warp& warp, uint32_t lanes, const char* what) const {
  const bool own = &warp == &warps_[self->warp()];
  const std::string whose = own ? "this warp" : "warp " + std::to_string(&warp - warps_);
  return "lane " + std::to_string(std::countr_zero(lanes)) + " of " + whose + " " + what +
         (lanes == warp.arrived      ? " " + std::string(warp.operation) + " at " + place(warp.site)
          : lanes == warp.at_barrier ? " at " + place(barrier_)
                                     : "");
}

inline void Block::run(const char* name, dim3 shape, void (*body)(void*), void* argument) {
  name_ = name;
  body_ = body;
  argument_ = argument;
  count_ = shape.x * shape.y * shape.z;
  waiting_ = exited_ = warp_ = ready_warps_ = tick = 0;
  epoch = ++clock;
  stacks_.reserve(count_);
  for (unsigned id = 0; id < count_; ++id) {
    Thread& thread = threads_[id];
    thread.id = id;
    thread.index = {id % shape.x, id / shape.x % shape.y, id / (shape.x * shape.y)};
    thread.copies.clear();
    thread.fence = thread.earlier_fence = {};
    thread.fiber.prepare(stacks_.bottom(id), stacks_.top(id), &Block::enter);
  }
  for (unsigned first = 0, w = 0; first < count_; first += kWarpSize, ++w) {
    warps_[w] = Warp{};
    const unsigned left = count_ - first;
    warps_[w].members = left >= kWarpSize ? ~0u : (1u << left) - 1;
    warps_[w].epoch = clock;
    make_ready(w, warps_[w].members);
  }
  std::fill(std::begin(group_arrived_), std::end(group_arrived_), 0);
  for (PendingProducts& products : products_) products.clear();
  error_.clear();
  self = pick();
  threadIdx = self->index;
  Fiber::switch_to(main_, self->fiber);
  self = nullptr;
  if (!error_.empty()) throw std::runtime_error(error_);
}

inline void Block::enter() {
  Fiber* next = &block.main_;
  // No switch inside a handler: the C++ runtime keeps one stack of exceptions for all fibers.
  try {
    block.body_(block.argument_);
    block.exit_thread();
    if (block.exited_ < block.count_) {
      block.self = block.pick();
      threadIdx = block.self->index;
      next = &block.self->fiber;
    }
  } catch (const std::exception& e) {
    block.error_ = e.what();
  }
  ++block.switches;
  Fiber abandoned;
  Fiber::switch_to(abandoned, *next);
  __builtin_unreachable();
}

inline void Block::exit_thread() {
  Warp& warp = warps_[self->warp()];
  if (!self->copies.empty())
    fail(self->copies.oldest().site, "an asynchronous copy is never waited for");
  if (!products().empty()) fail(products().oldest().site, "wgmma is never waited for");
  if (const Warp* other = waiting_group(self->warp()))
    fail(other->site, "this thread exits, but " + describe(*other, other->arrived, "waits in"));
  if (waiting_ > 0)
    fail(barrier_, "this thread exits, but " + std::to_string(waiting_) + " of the block's " +
                       std::to_string(count_) + " threads wait in sync_block here");
  warp.exited |= 1u << self->lane();
  ++exited_;
}

inline Thread* Block::pick() {
  if (ready_warps_ == 0) throw std::runtime_error(std::string(name_) + ": no thread can go on");
  unsigned lane;
  if (policy == Policy::kInOrder) {
    warp_ = static_cast<unsigned>(std::countr_zero(ready_warps_));
    lane = static_cast<unsigned>(std::countr_zero(warps_[warp_].ready));
  } else {
    if (policy == Policy::kUniform || warps_[warp_].ready == 0) warp_ = random.bit_of(ready_warps_);
    lane = random.bit_of(warps_[warp_].ready);
  }
  uint32_t& ready = warps_[warp_].ready;
  ready &= ~(1u << lane);
  if (ready == 0) ready_warps_ &= ~(1u << warp_);
  return &threads_[warp_ * kWarpSize + lane];
}

inline void Block::yield() {
  Thread* const from = self;
  Thread* const to = pick();
  if (from == to) return;
  self = to;
  threadIdx = to->index;
  ++switches;
  Fiber::switch_to(from->fiber, to->fiber);
}

inline void Block::barrier(const Site& site) {
  Warp& warp = warps_[self->warp()];
  if (const Warp* other = waiting_group(self->warp()))
    fail(site, "sync_block, but " + describe(*other, other->arrived, "waits in"));
  if (exited_ > 0)
    fail(site, "sync_block, but " + std::to_string(exited_) + " of the block's " +
                   std::to_string(count_) + " threads have exited");
  if (waiting_ == 0)
    barrier_ = site;
  else if (!same_site(barrier_, site))
    fail(site, "sync_block, but other threads wait in another one, at " + place(barrier_));
  warp.at_barrier |= 1u << self->lane();
  if (++waiting_ == count_) {
    epoch = ++clock;
    waiting_ = 0;
    for (unsigned w = 0; w * kWarpSize < count_; ++w) {
      warps_[w].at_barrier = 0;
      warps_[w].epoch = clock;
      make_ready(w, warps_[w].members);
    }
  }
  yield();
}

inline void Block::refuse(const Warp& warp, const char* operation, const Site& site) {
  std::string why;
  if (warp.members != ~0u)
    why = "the block's last warp has less than 32 threads";
  else if (warp.exited != 0)
    why = describe(warp, warp.exited, "has exited");
  else if (warp.at_barrier != 0)
    why = describe(warp, warp.at_barrier, "waits in sync_block");
  else
    why = describe(warp, warp.arrived, "waits in");
  fail(site, std::string(operation) + ", but " + why);
}

inline Warp& Block::arrive(const char* operation, const Site& site, void* mine) {
  Warp& warp = warps_[self->warp()];
  const bool together =
      warp.arrived == 0 || (warp.operation == operation && same_site(warp.site, site));
  if (warp.members != ~0u || (warp.exited | warp.at_barrier) != 0 || !together) [[unlikely]]
    refuse(warp, operation, site);
  warp.operation = operation;
  warp.site = site;
  warp.lanes[self->lane()] = mine;
  warp.arrived |= 1u << self->lane();
  return warp;
}

template <class Lane, class F>
void Block::collective(const char* operation, const Site& site, Lane& mine, const F& perform) {
  Warp& warp = arrive(operation, site, &mine);
  if (warp.arrived == ~0u) {
    perform(reinterpret_cast<Lane**>(warp.lanes));
    warp.arrived = 0;
    make_ready(self->warp(), ~0u);
  }
  yield();
}

template <class Lane, class F>
void Block::group_collective(const char* operation, const Site& site, Lane& mine,
                             const F& perform) {
  const unsigned group = self->warp() / kGroupWarps;
  Warp* const warps = &warps_[group * kGroupWarps];
  if (count_ < (group + 1) * kGroupSize)
    fail(site, std::string(operation) + ", but the block's last warpgroup has less than 4 warps");
  for (unsigned w = 0; w < kGroupWarps; ++w) {
    const bool whole = (group_arrived_[group] >> w & 1) != 0;
    if ((warps[w].exited | warps[w].at_barrier) != 0 ||
        (whole && (warps[w].operation != operation || !same_site(warps[w].site, site))))
      refuse(warps[w], operation, site);
  }
  if (arrive(operation, site, &mine).arrived == ~0u) {
    group_arrived_[group] |= 1u << self->warp() % kGroupWarps;
    if (group_arrived_[group] == (1u << kGroupWarps) - 1) {
      Lane* lanes[kGroupSize];
      for (unsigned l = 0; l < kGroupSize; ++l)
        lanes[l] = static_cast<Lane*>(warps[l / kWarpSize].lanes[l % kWarpSize]);
      perform(lanes);
      group_arrived_[group] = 0;
      for (unsigned w = 0; w < kGroupWarps; ++w) {
        warps[w].arrived = 0;
        make_ready(group * kGroupWarps + w, ~0u);
      }
    }
  }
  yield();
}

}  // namespace bert_unpad::block_model
