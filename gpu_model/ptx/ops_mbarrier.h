// mbarrier.*, and arrivals at mbarriers that wait for a thread's asynchronous copies.
#pragma once

#include <cstdint>
#include <string>

#include "gpu_model/ptx/access.h"
#include "gpu_model/ptx/ops_memory.h"

namespace bert_unpad::ptx {

// Where in shared memory an mbarrier is, by its own or its generic address.
inline uint32_t mbarrier_offset(Warp& w, const Instruction& i, uint64_t address, int lane) {
  const uint64_t window = address & ~kWindowMask, offset = (address & kWindowMask) - kSharedBase;
  if (window != 0 && window != kSharedWindow)
    w.fail(i, 1u << lane, "an mbarrier that is not in shared memory");
  if (!w.block->shared.in_range(offset, MBarrier::kBytes))
    w.fail(i, 1u << lane, "an mbarrier" + w.block->shared.range_problem(offset, MBarrier::kBytes));
  return static_cast<uint32_t>(offset);
}

inline MBarrier& mbarrier_at(Warp& w, const Instruction& i, uint32_t offset, int lane) {
  MBarrier* const barrier = w.block->mbarriers.find(offset);
  if (barrier == nullptr)
    w.fail(i, 1u << lane,
           "shared memory at offset " + std::to_string(offset) +
               " is no mbarrier: mbarrier.init has not come here");
  const auto conflict = w.block->shared.use_barrier(offset, accessor(w, i, lane));
  if (conflict.what != SharedMemory::Problem::kNone)
    fail_conflict(w, i, lane, conflict, "mbarrier operation");
  return *barrier;
}

// f(barrier, lanes) for the lanes that name the same mbarrier.
template <class F>
void for_mbarriers(Warp& w, const Instruction& i, uint32_t lanes, const F& f) {
  while (lanes != 0) {
    const int first = std::countr_zero(lanes);
    const uint64_t address = address_of(w, i, first);
    uint32_t same = 0;
    for_lanes(lanes, [&](int l) { same |= uint32_t{address_of(w, i, l) == address} << l; });
    f(mbarrier_at(w, i, mbarrier_offset(w, i, address, first), first), same);
    lanes &= ~same;
  }
}

inline void mbarrier_init(Warp& w, const Instruction& i, uint32_t lanes) {
  Block& block = *w.block;
  for_lanes(lanes, [&](int l) {
    const uint32_t offset = mbarrier_offset(w, i, address_of(w, i, l), l);
    const uint32_t count = w.in<uint32_t>(i.a[2])[l];
    if (count == 0 || count > MBarrier::kMaxCount)
      w.fail(i, 1u << l, "an mbarrier that expects " + std::to_string(count) + " arrivals");
    const auto conflict = block.shared.start_barrier(offset, MBarrier::kBytes, accessor(w, i, l));
    if (conflict.what != SharedMemory::Problem::kNone)
      fail_conflict(w, i, l, conflict, "mbarrier.init");
    block.mbarriers.add(offset, count, block.clocks);
  });
}

inline void mbarrier_invalidate(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) {
    const uint32_t offset = mbarrier_offset(w, i, address_of(w, i, l), l);
    mbarrier_at(w, i, offset, l);
    w.block->mbarriers.remove(offset);
    w.block->shared.end_barrier(offset, MBarrier::kBytes);
  });
}

// What arrive returns: the open phase, and how many arrivals it expects.
inline uint64_t mbarrier_state(const MBarrier& barrier) {
  return barrier.phase() << 20 | barrier.pending();
}

enum class Arrival : uint8_t { kPlain, kDrop, kNoComplete, kExpectBytes };

// a[1]: the state, a[2]: a count of arrivals, or of bytes. `wide_data`: it is relaxed, and passes
// nothing on.
template <Arrival kKind>
void mbarrier_arrive(Warp& w, const Instruction& i, uint32_t lanes) {
  Block& block = *w.block;
  const uint32_t pc = accessor(w, i, 0).pc;
  const auto operand = w.in<uint32_t>(i.a[2]);
  auto* const states = reinterpret_cast<uint64_t*>(w.file + i.a[1]);
  for_mbarriers(w, i, lanes, [&](MBarrier& barrier, uint32_t same) {
    uint64_t released = ~uint64_t{0};
    for_lanes(same, [&](int l) {
      // To each phase in which some arrive.
      if (!i.wide_data && barrier.phase() != released)
        block.clocks.release(w.id, same, same == w.live, barrier.arriving());
      released = barrier.phase();
      states[l] = mbarrier_state(barrier);
      std::string problem;
      uint32_t count = operand[l];
      if constexpr (kKind == Arrival::kExpectBytes) {
        problem = barrier.expect_bytes(count);
        count = 1;
      }
      if (problem.empty()) problem = barrier.arrive(count, kKind == Arrival::kDrop);
      if (kKind == Arrival::kNoComplete && barrier.phase() != released)
        problem = "an arrival with .noComplete that completes a phase";
      block.finish_mbarrier(w, pc, 1u << l, problem);
    });
  });
}

// Of bytes only: no arrival.
template <bool kExpect>
void mbarrier_bytes(Warp& w, const Instruction& i, uint32_t lanes) {
  const auto bytes = w.in<uint32_t>(i.a[2]);
  for_mbarriers(w, i, lanes, [&](MBarrier& barrier, uint32_t same) {
    for_lanes(same, [&](int l) {
      const std::string problem =
          kExpect ? barrier.expect_bytes(bytes[l]) : barrier.complete_bytes(bytes[l]);
      w.block->finish_mbarrier(w, accessor(w, i, l).pc, 1u << l, problem);
    });
  });
}

// test_wait and try_wait, which may wait: here both look once, and a warp that looked in vain goes
// on when a phase has completed or nothing else can go on. a[1]: the predicate, a[2]: parity or
// state.
template <bool kParity>
void mbarrier_wait(Warp& w, const Instruction& i, uint32_t lanes) {
  const uint32_t pc = w.pc++;
  uint32_t done = 0;
  if (!w.block->pass("mbarrier_wait", w, i)) {
    done = lanes;
  } else {
    for_mbarriers(w, i, lanes, [&](MBarrier& barrier, uint32_t same) {
      uint32_t past = 0;
      for_lanes(same, [&](int l) {
        if constexpr (kParity) {
          past |= uint32_t{barrier.is_past(w.in<uint32_t>(i.a[2])[l])} << l;
        } else {
          const uint64_t phase = w.in<uint64_t>(i.a[2])[l] >> 20;
          if (phase > barrier.phase() || phase + 1 < barrier.phase())
            w.fail(i, 1u << l, "a state that is not of the mbarrier's last or open phase");
          past |= uint32_t{phase < barrier.phase()} << l;
        }
      });
      if (past == 0) return;
      const View& seen = barrier.see();
      if (!i.wide_data) w.block->clocks.acquire(w.id, past, past == w.live, seen);
      done |= past;
    });
  }
  write_predicate(w.file, i.a[1], lanes, done);
  if (done == lanes) return;
  w.state = Warp::State::kPolling;
  w.barrier_pc = pc;
}

inline void decode_mbarrier(Decoder& d, Statement& s, Instruction& i) {
  const std::string kind(s.modifiers.empty() ? "" : s.modifiers.front());
  s.take(kind);
  for (const char* name : {"shared", "shared::cta", "cta", "cluster", "acquire", "release", "b64"})
    s.take(name);
  i.wide_data = s.take("relaxed");
  if (kind == "init" || kind == "inval") {
    d.address(s.operands.at(0), i, 0);
    note_grain(d, Space::kShared, MBarrier::kBytes);
    i.run = mbarrier_invalidate;
    if (kind == "inval") return;
    i.a[2] = d.in(s.operands.at(1), Type::kU32);
    i.run = mbarrier_init;
  } else if (kind == "arrive" || kind == "arrive_drop") {
    const bool bytes = s.take("expect_tx"), completes = !s.take("noComplete");
    i.a[1] = d.out(s.operands.at(0), 64);
    d.address(s.operands.at(1), i, 0);
    i.a[2] = s.operands.size() > 2 ? d.in(s.operands[2], Type::kU32) : d.constant(1, false);
    if (kind == "arrive_drop")
      i.run = bytes || !completes ? nullptr : mbarrier_arrive<Arrival::kDrop>;
    else
      i.run = bytes        ? mbarrier_arrive<Arrival::kExpectBytes>
              : !completes ? mbarrier_arrive<Arrival::kNoComplete>
                           : mbarrier_arrive<Arrival::kPlain>;
  } else if (kind == "expect_tx" || kind == "complete_tx") {
    d.address(s.operands.at(0), i, 0);
    i.a[2] = d.in(s.operands.at(1), Type::kU32);
    i.run = kind == "expect_tx" ? mbarrier_bytes<true> : mbarrier_bytes<false>;
  } else if (kind == "test_wait" || kind == "try_wait") {
    i.kind = Kind::kControl;
    const bool parity = s.take("parity");
    i.a[1] = d.predicate_out(s.operands.at(0));
    d.address(s.operands.at(1), i, 0);
    i.a[2] = d.in(s.operands.at(2), parity ? Type::kU32 : Type::kU64);
    i.run = parity ? mbarrier_wait<true> : mbarrier_wait<false>;
  } else if (kind == "pending_count") {
    i.a[1] = d.out(s.operands.at(0), 32);
    i.a[2] = d.in(s.operands.at(1), Type::kU64);
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      const auto state = w.in<uint64_t>(i.a[2]);
      write_lanes<uint32_t>(w.file, i.a[1], lanes,
                            [&](int l) { return static_cast<uint32_t>(state[l] & 0xfffff); });
    };
  }
}

// cp.async.mbarrier.arrive: an arrival when the copies that the thread has started have landed.
// Without .noinc it is one more than the mbarrier expects.
inline void decode_copy_arrival(Decoder& d, Statement& s, Instruction& i) {
  for (const char* name : {"mbarrier", "arrive", "b64"})
    if (!s.take(name)) throw std::runtime_error(std::string("expected .") + name);
  s.take("shared");
  s.take("shared::cta");
  i.wide_data = s.take("noinc");
  d.address(s.operands.at(0), i, 0);
  i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
    for_lanes(lanes, [&](int l) {
      const uint32_t offset = mbarrier_offset(w, i, address_of(w, i, l), l);
      MBarrier& barrier = mbarrier_at(w, i, offset, l);
      PendingTask task{accessor(w, i, l), offset};
      task.copies = w.copy_count;
      if (const std::string problem = i.wide_data ? "" : barrier.expect_arrival(); !problem.empty())
        w.fail(i, 1u << l, problem);
      w.block->pending.add(*w.block, std::move(task));
    });
  };
}

}  // namespace bert_unpad::ptx
