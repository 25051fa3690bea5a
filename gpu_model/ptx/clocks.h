// What the parts of a block have seen of what the others did: vector clocks.
//
// Each actor has a clock: warps, whose barriers advance it; warpgroups, whose clock counts their
// wgmma; and mbarriers, whose clock counts their phases, in which bulk copies complete. An access
// is stamped with its actor's clock, and happened before all that has seen a later one. Barriers
// pass on what has been seen. So what is ordered does not depend on the schedule that was run.
//
// Mostly the lanes of a warp act together, and what one of them has seen all have. A lane may also
// release something or wait for it alone (mbarriers): then this is known of the lane only, until
// the next barrier of its warp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "gpu_model/ptx/registers.h"

namespace bert_unpad::ptx {

// Who does an access: one lane, or its whole warp (of ldmatrix and wgmma).
struct Accessor {
  uint32_t warp, lane;
  bool whole_warp;
  uint32_t pc;
};

inline void merge_clocks(std::vector<uint32_t>& own, const std::vector<uint32_t>& other) {
  if (own.size() < other.size()) own.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) own[i] = std::max(own[i], other[i]);
}

// What of each actor, and of single lanes, happened before something: nothing where there are no
// entries.
struct Horizon {
  std::vector<uint32_t> actors;
  std::vector<uint32_t> lanes;  // [warp, lane]; empty until a lane releases something alone

  bool covers(uint32_t actor, uint32_t clock) const {
    return actor < actors.size() && clock < actors[actor];
  }
  void set(uint32_t actor, uint32_t clock) {
    if (actors.size() <= actor) actors.resize(actor + 1);
    actors[actor] = std::max(actors[actor], clock);
  }
  void clear() {
    actors.clear();
    lanes.clear();
  }

  void merge(const Horizon& other) {
    merge_clocks(actors, other.actors);
    merge_clocks(lanes, other.lanes);
  }
  void add_lanes(uint32_t warps, uint32_t warp, uint32_t which, uint32_t clock) {
    lanes.resize(size_t{warps} * kLanes);
    for_lanes(which, [&](int l) { lanes[warp * kLanes + static_cast<uint32_t>(l)] = clock; });
  }
};

struct View {
  Horizon ordered;
  // The same with a proxy fence between: what the async proxy (wgmma, bulk copies) sees too.
  Horizon fenced;

  void merge(const View& other) {
    ordered.merge(other.ordered);
    fenced.merge(other.fenced);
  }
  void clear() {
    ordered.clear();
    fenced.clear();
  }
};

class Clocks {
 public:
  static constexpr uint32_t kMaxBarriers = 64;

  void reset(uint32_t warps, uint32_t groups) {
    warps_ = warps;
    actors_ = readers_ = warps + groups;
    now_.assign(warps, 1);
    View start;
    start.ordered.actors.assign(readers_, 1);
    views_.assign(warps, start);
    alone_.assign(warps, {});
    lanes_act_alone_ = false;
  }
  uint32_t warps() const { return warps_; }
  // Actors that read: warps and warpgroups.
  uint32_t readers() const { return readers_; }
  uint32_t group(uint32_t number) const { return warps_ + number; }
  uint32_t add_barrier() {
    if (actors_ == readers_ + kMaxBarriers)
      throw std::runtime_error("more than " + std::to_string(kMaxBarriers) +
                               " mbarriers in a block, which is not modelled");
    return actors_++;
  }
  uint32_t now(uint32_t warp) const { return now_[warp]; }
  // Of each reader: what it did with a smaller clock happened before what `warp` does now; of the
  // warp itself, what all of its lanes did.
  const uint32_t* seen(uint32_t warp) const { return views_[warp].ordered.actors.data(); }

  // Whether what a lane of an actor, or `several`, did at `clock` happened before what `by` does.
  bool before(const Accessor& by, uint32_t actor, uint32_t lane, bool several,
              uint32_t clock) const {
    if (actor < readers_ && clock < seen(by.warp)[actor]) return true;
    if (actor == by.warp && lane == by.lane && !several && !by.whole_warp) return true;
    return (lanes_act_alone_ || actor >= readers_) &&
           seen_alone(by, actor, lane, several, clock, &View::ordered);
  }
  // Whether a proxy fence lies between too.
  bool fenced(const Accessor& by, uint32_t actor, uint32_t lane, uint32_t clock) const {
    return views_[by.warp].fenced.covers(actor, clock) ||
           (lanes_act_alone_ && seen_alone(by, actor, lane, false, clock, &View::fenced));
  }

  // The lanes of a warp wait for each other.
  void sync(uint32_t warp) {
    join(warp);
    views_[warp].ordered.actors[warp] = ++now_[warp];
  }
  // What a warp did so far, and had seen, is passed on by a barrier at which it arrives, ...
  void leave(uint32_t warp, View& barrier) {
    ++now_[warp];
    barrier.merge(views_[warp]);
    for (const Alone& some : alone_[warp]) barrier.merge(some.view);
    barrier.ordered.set(warp, now_[warp]);
  }
  // ... to the warps that wait there.
  void enter(uint32_t warp, const View& barrier) {
    join(warp);
    views_[warp].merge(barrier);
  }

  // The same for some lanes of a warp, or all that live.
  void release(uint32_t warp, uint32_t lanes, bool all, View& into) {
    if (all) return leave(warp, into);
    ++now_[warp];
    into.merge(views_[warp]);
    for (const Alone& some : alone_[warp])
      if ((some.lanes & lanes) != 0) into.merge(some.view);
    into.ordered.add_lanes(warps_, warp, lanes, now_[warp]);
    lanes_act_alone_ = true;
  }
  void acquire(uint32_t warp, uint32_t lanes, bool all, const View& from) {
    (all ? views_[warp] : view_alone(warp, lanes)).merge(from);
  }
  // fence.proxy.async
  void fence(uint32_t warp, uint32_t lanes, bool all) {
    ++now_[warp];
    View& view = views_[warp];
    if (all) {
      view.fenced.merge(view.ordered);
      view.fenced.set(warp, now_[warp]);
      for (Alone& some : alone_[warp]) some.view.fenced.merge(some.view.ordered);
    } else {
      View& own = view_alone(warp, lanes);
      own.fenced.merge(view.ordered);
      own.fenced.merge(own.ordered);
      own.fenced.add_lanes(warps_, warp, lanes, now_[warp]);
    }
  }
  // A warp has seen what an actor did up to `clock`.
  void observe(uint32_t warp, uint32_t actor, uint32_t clock) {
    views_[warp].ordered.set(actor, clock);
  }

 private:
  // What some lanes of a warp have seen beyond the others.
  struct Alone {
    uint32_t lanes;
    View view;
  };

  View& view_alone(uint32_t warp, uint32_t lanes) {
    lanes_act_alone_ = true;
    for (Alone& some : alone_[warp])
      if (some.lanes == lanes) return some.view;
    return alone_[warp].emplace_back(Alone{lanes, {}}).view;
  }
  void join(uint32_t warp) {
    for (const Alone& some : alone_[warp]) views_[warp].merge(some.view);
    alone_[warp].clear();
  }

  [[gnu::noinline]] bool seen_alone(const Accessor& by, uint32_t actor, uint32_t lane, bool several,
                                    uint32_t clock, Horizon View::* which) const {
    const auto covers = [&](const Horizon& h) {
      return h.covers(actor, clock) || (!several && actor < warps_ && !h.lanes.empty() &&
                                        clock < h.lanes[actor * kLanes + lane]);
    };
    if (covers(views_[by.warp].*which)) return true;
    if (by.whole_warp) return false;
    for (const Alone& some : alone_[by.warp])
      if ((some.lanes >> by.lane & 1) != 0 && covers(some.view.*which)) return true;
    return false;
  }

  uint32_t warps_ = 0, readers_ = 0, actors_ = 0;
  bool lanes_act_alone_ = false;
  std::vector<uint32_t> now_;
  std::vector<View> views_;
  std::vector<std::vector<Alone>> alone_;
};

}  // namespace bert_unpad::ptx
