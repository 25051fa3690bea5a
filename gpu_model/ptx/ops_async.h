// The async proxy's copies and fences, and when pending work is done.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "gpu_model/ptx/ops_mbarrier.h"
#include "gpu_model/ptx/ops_memory.h"

namespace bert_unpad::ptx {

inline void PendingWork::add(Block& block, PendingTask task) {
  task.early = block.draw_early();
  has_early_ |= task.early;
  tasks_.push_back(std::move(task));
}

inline bool PendingWork::run_next(Block& block, bool early_only) {
  size_t count = 0;
  for (const PendingTask& task : tasks_) count += !early_only || task.early;
  if (early_only) has_early_ = count > 0;
  if (count == 0) return false;
  size_t skip = block.random.next() % count, at = 0;
  for (;; ++at)
    if ((!early_only || tasks_[at].early) && skip-- == 0) break;
  const PendingTask task = std::move(tasks_[at]);
  tasks_.erase(tasks_.begin() + static_cast<std::ptrdiff_t>(at));
  run(block, task);
  return true;
}

inline void PendingWork::finish_copies(Block& block, uint32_t warp, uint32_t lanes) {
  for (size_t at = 0; at < tasks_.size();) {
    const PendingTask& task = tasks_[at];
    if (task.bytes != 0 || task.by.warp != warp || (lanes >> task.by.lane & 1) == 0) {
      ++at;
      continue;
    }
    const PendingTask due = task;
    tasks_.erase(tasks_.begin() + static_cast<std::ptrdiff_t>(at));
    run(block, due);
  }
}

inline void PendingWork::run(Block& block, const PendingTask& task) {
  Warp& warp = block.warps[task.by.warp];
  const auto lane = static_cast<int>(task.by.lane);
  MBarrier* const barrier = block.mbarriers.find(task.barrier);
  if (barrier == nullptr)
    warp.fail(task.by.pc, lane, "the mbarrier of a copy was invalidated before the copy landed");
  std::string problem;
  if (task.bytes != 0) {
    std::memcpy(block.shared.data(task.offset),
                task.source != nullptr ? task.source : task.data.data(), task.bytes);
    block.shared.land_bulk_copy(task.offset, task.bytes, barrier->actor, barrier->clock(),
                                task.by.pc);
    problem = barrier->complete_copy(task.bytes, task.by);
  } else {
    std::erase_if(warp.copies, [&](const PendingCopy& copy) {
      if (copy.lane != task.by.lane || copy.number >= task.copies) return false;
      land_copy(warp, copy);
      return true;
    });
    block.clocks.release(warp.id, 1u << lane, false, barrier->arriving());
    problem = barrier->arrive(1, false);
  }
  block.finish_mbarrier(warp, task.by.pc, 1u << lane, problem);
}

// cp.async.bulk from global to shared memory, which completes bytes of an mbarrier. a[0]: where to,
// a[1]: from where, a[2]: bytes, a[3]: the mbarrier.
inline void copy_bulk(Warp& w, const Instruction& i, uint32_t lanes) {
  Block& block = *w.block;
  for_lanes(lanes, [&](int l) {
    const auto fail = [&](const std::string& text) { w.fail(i, 1u << l, text); };
    const uint32_t bytes = w.in<uint32_t>(i.a[2])[l];
    const uint64_t source =
        w.in<uint64_t>(i.a[1])[l] + static_cast<uint64_t>(i.source_displacement);
    const uint64_t offset = (address_of(w, i, l) & kWindowMask) - kSharedBase;
    if (bytes == 0 || bytes % 16 != 0 || source % 16 != 0)
      fail("a bulk copy of " + std::to_string(bytes) +
           " bytes: its size and both addresses have to be multiples of 16");
    if (!block.shared.in_range(offset, bytes, 16))
      fail("a bulk copy" + block.shared.range_problem(offset, bytes));
    const auto barrier_address =
        static_cast<uint64_t>((i.wide ? w.in<uint64_t>(i.a[3])[l] : w.in<uint32_t>(i.a[3])[l]) +
                              static_cast<uint64_t>(i.barrier_displacement));
    PendingTask task{accessor(w, i, l), mbarrier_offset(w, i, barrier_address, l)};
    const MBarrier& barrier = mbarrier_at(w, i, task.barrier, l);
    if (!barrier.published && !block.shared.barrier_is_visible(task.barrier, task.by))
      fail(
          "a bulk copy with an mbarrier that was initialised with no fence.mbarrier_init or "
          "fence.proxy.async since");
    const auto conflict =
        block.shared.start_bulk_copy(static_cast<uint32_t>(offset), bytes, task.by);
    if (conflict.what != SharedMemory::Problem::kNone)
      fail_conflict(w, i, l, conflict, "bulk copy");
    for (uint32_t at = 0; at < bytes; at += 16)
      global_bytes(w, i, source + at, 16, l, Access::kCopy);
    task.offset = static_cast<uint32_t>(offset);
    task.bytes = bytes;
    const auto* from = reinterpret_cast<const unsigned char*>(source);
    std::memset(block.shared.data(task.offset), 0xff, bytes);
    if (block.draw_early())
      task.data.assign(from, from + bytes);
    else
      task.source = from;
    block.pending.add(block, std::move(task));
  });
}

inline void decode_bulk_copy(Decoder& d, Statement& s, Instruction& i) {
  s.take("bulk");
  const bool to_shared = s.take("shared::cluster") || s.take("shared::cta");
  if (!to_shared || !s.take("global") || !s.take("mbarrier::complete_tx::bytes"))
    throw std::runtime_error(
        "only bulk copies from global to shared memory that complete bytes of an mbarrier are "
        "known");
  if (s.take("L2::cache_hint")) d.in(s.operands.at(4), Type::kU64);
  Instruction source, barrier;
  d.address(s.operands.at(1), source, 0);
  d.address(s.operands.at(3), barrier, 0);
  d.address(s.operands.at(0), i, 0);
  if (i.wide != barrier.wide)
    throw std::runtime_error("expected addresses in shared memory of the same width");
  i.a[1] = source.a[0];
  i.source_displacement = source.immediate;
  i.a[2] = d.in(s.operands.at(2), Type::kU32);
  i.a[3] = barrier.a[0];
  i.barrier_displacement = barrier.immediate;
  note_grain(d, Space::kShared, 16);
  i.run = copy_bulk;
}

inline void decode_any_copy(Decoder& d, Statement& s, Instruction& i) {
  const auto has = [&](std::string_view name) {
    return std::find(s.modifiers.begin(), s.modifiers.end(), name) != s.modifiers.end();
  };
  if (!has("bulk") && !has("mbarrier")) return decode_copy(d, s, i);
  s.take("async");
  if (has("bulk")) return decode_bulk_copy(d, s, i);
  decode_copy_arrival(d, s, i);
}

// Of fences only those between proxies, and after mbarrier.init, change anything here: blocks run
// one after the other and instructions in order.
inline void decode_fence(Decoder&, Statement& s, Instruction& i) {
  if (s.take("proxy")) {
    if (!s.take("async")) throw std::runtime_error("only fences of the async proxy are known");
    const bool global_only = s.take("global");
    s.take("shared::cta");
    s.take("shared::cluster");
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      if (w.block->pass("fence_shared", w, i)) w.block->clocks.fence(w.id, lanes, lanes == w.live);
    };
    if (!global_only) return;
  } else if (s.take("mbarrier_init")) {
    s.take("release");
    s.take("cluster");
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      for_lanes(lanes, [&](int l) {
        w.block->mbarriers.for_each([&](uint32_t offset, MBarrier& barrier) {
          const auto conflict = w.block->shared.use_barrier(offset, accessor(w, i, l));
          barrier.published |= conflict.what == SharedMemory::Problem::kNone;
        });
      });
    };
    return;
  } else {
    s.modifiers.clear();
  }
  i.run = [](Warp&, const Instruction&, uint32_t) {};
}

}  // namespace bert_unpad::ptx
