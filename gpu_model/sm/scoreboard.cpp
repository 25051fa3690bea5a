// Cycles of one SM: four partitions that each issue one instruction a cycle, in order within a
// warp, as the control codes allow.
//
// A warp issues when its last instruction's stall count has passed, the scoreboards that the
// instruction waits for are free, its pipe takes it, and, of asynchronous copies and products
// (wgmma), the groups that it waits for have landed. A partition issues for one of its warps that
// can: the next one in turn, or the one that it issued for last, then the oldest. Time goes on to
// the next cycle in which one of them can.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int kPartitions = 4, kBarriers = 6;
constexpr double kNever = 1e18;

// As scoreboard.py fills it.
enum Kind : int32_t {
  kPlain,
  kBlockBarrier,
  kCommit,
  kWaitGroups,
  kCopy,
  kArrival,  // at a barrier, without waiting there
  kProduct,  // `argument`: whether its group ends
  kWaitProducts,
  kMBarrierInit,
  kMBarrierChange,
  kMBarrierLate,  // a change when the warp's copies have landed
  kBulkCopy,
  kMBarrierWait
};
struct Record {
  int32_t kind, pipe, stall, wait_mask, write_barrier, read_barrier;
  int32_t argument;  // groups that may be on their way; a barrier's number
  int32_t warps;     // that a barrier waits for, 0 = all of the block; arrivals at an mbarrier
  int32_t bytes;     // that an mbarrier expects more, or less
  double busy, latency, read;
  double shared;  // of the path to shared memory, for another pipe
};
struct Machine {
  int32_t pipes, shared_pipe, heavy_pipe, fma_pipe, issue_only_pipe, greedy, mbarriers;
  double queue, barrier_latency, launch_latency;
};

// Phases as the PTX ISA has them: one ends when all have arrived and no bytes are missing.
struct MBarrier {
  int64_t expected = 0, pending = 0, bytes = 0;
  int32_t phase = 0;
  double settled = 0.0, opened = 0.0;  // when the open phase can end; when the last one did

  void change(const Record& r, double time) {
    pending -= r.warps;
    bytes += r.bytes;
    settled = std::max(settled, time);
    if (pending != 0 || bytes != 0) return;
    ++phase;
    pending = expected;
    opened = settled;
    settled = 0.0;
  }
};

// Groups of products of a warpgroup: each is done when all of its warps have issued theirs, and
// when the last of these is.
constexpr int kGroupWarps = 4;
struct Products {
  std::vector<int> issued;
  std::vector<double> done;

  void commit(size_t group, double time) {
    if (group == issued.size()) {
      issued.push_back(0);
      done.push_back(0.0);
    }
    ++issued[group];
    done[group] = std::max(done[group], time);
  }
};

constexpr int kBlockBarriers = 16;
struct Block {
  int warps = 0, done = 0;
  int arrived[kBlockBarriers] = {}, wanted[kBlockBarriers] = {}, phase[kBlockBarriers] = {};
  double opens[kBlockBarriers] = {};
  std::vector<MBarrier> mbarriers;
  std::vector<Products> products;  // of each warpgroup

  // Opens a barrier that all have come to. Warps that have ended count as there.
  bool open(int number, double time) {
    const int all = wanted[number] ? wanted[number] : warps - done;
    if (arrived[number] == 0 || arrived[number] < all) return false;
    arrived[number] = 0;
    ++phase[number];
    opens[number] = time;
    return true;
  }
};

struct Warp {
  const int32_t* trace;
  int64_t length, at = 0;
  int block, group, repeats_left;
  double next;     // its next instruction's first cycle, as far as the last one decides
  int phase = -1;  // of the barrier that it waits at
  double barriers[kBarriers] = {};
  // When those since the last commit have landed, and each committed group.
  double copies = 0.0, products = 0.0;
  double landed = 0.0;  // when all copies have
  std::vector<double> groups;
  size_t product_groups = 0;  // that it has committed
};

}  // namespace

// Warp w executes `lengths[w]` records from traces[starts[w]] on, `repeats` times, and belongs to
// block blocks[w] and partition partitions[w]; a block begins again when all of its warps have
// ended, after the launch latency. `first`: when a block begins at first. `busy`: cycles of each
// pipe, summed over partitions, then all issued instructions. Returns the last cycle.
extern "C" __attribute__((visibility("default"))) double sm_simulate(
    const Machine* machine, const Record* records, const int32_t* traces, int32_t warp_count,
    const int64_t* starts, const int64_t* lengths, const int32_t* blocks, const int32_t* partitions,
    int32_t block_count, const double* first, int32_t repeats, double* busy) {
  const Machine& m = *machine;
  std::vector<Block> all_blocks(block_count);
  for (Block& block : all_blocks) block.mbarriers.resize(m.mbarriers);
  std::vector<Warp> warps(warp_count);
  std::vector<std::vector<int>> of_partition(kPartitions);
  for (int w = 0; w < warp_count; ++w) {
    Warp& warp = warps[w];
    warp.trace = traces + starts[w];
    warp.length = lengths[w];
    warp.block = blocks[w];
    warp.repeats_left = repeats;
    warp.next = first[blocks[w]];
    Block& block = all_blocks[warp.block];
    warp.group = block.warps++ / kGroupWarps;
    block.products.resize(static_cast<size_t>(warp.group) + 1);
    of_partition[partitions[w]].push_back(w);
  }
  std::vector<double> pipes(static_cast<size_t>(kPartitions) * m.pipes, 0.0);
  std::vector<int> last(kPartitions, 0);
  // When the path to shared memory has done what came to it, and with products' operands, which let
  // all other accesses go first.
  double shared = 0.0, operands = 0.0;
  double now = 0.0, end = 0.0;
  int running = warp_count;

  // Ends the warp's pass; the block's last warp starts all of them again.
  const auto finish = [&](Warp& warp, double time) {
    Block& block = all_blocks[warp.block];
    end = std::max(end, time);
    warp.next = kNever;
    if (++block.done < block.warps) {
      for (int b = 0; b < kBlockBarriers; ++b) block.open(b, time + m.barrier_latency);
      return;
    }
    block.done = 0;
    std::fill(block.products.begin(), block.products.end(), Products{});
    for (Warp& other : warps) {
      if (other.block != warp.block) continue;
      if (--other.repeats_left == 0) {
        --running;
        continue;
      }
      other.at = 0;
      other.next = time + m.launch_latency;
      other.copies = other.products = other.landed = 0.0;
      other.groups.clear();
      other.product_groups = 0;
      std::fill(other.barriers, other.barriers + kBarriers, 0.0);
    }
  };

  // When the warp's next instruction can issue, by what is known now.
  const auto ready = [&](Warp& warp, int partition) {
    double time = warp.next;
    if (time >= kNever) return kNever;
    const Record& r = records[warp.trace[warp.at]];
    for (int b = 0; b < kBarriers; ++b)
      if (r.wait_mask >> b & 1) time = std::max(time, warp.barriers[b]);
    if (r.kind == kWaitGroups) {
      const int64_t count = static_cast<int64_t>(warp.groups.size());
      for (int64_t g = 0; g + r.argument < count; ++g) time = std::max(time, warp.groups[g]);
    }
    if (r.kind == kWaitProducts) {
      const Block& block = all_blocks[warp.block];
      const Products& products = block.products[warp.group];
      const int warps = std::min(kGroupWarps, block.warps - warp.group * kGroupWarps);
      for (size_t g = 0; g + r.argument < warp.product_groups; ++g) {
        if (products.issued[g] < warps) return kNever;  // until the last warp comes
        time = std::max(time, products.done[g]);
      }
    }
    if (r.kind == kMBarrierWait) {
      const MBarrier& mbarrier = all_blocks[warp.block].mbarriers[r.argument];
      if ((mbarrier.phase & 1) == r.warps) return kNever;  // until it ends
      time = std::max(time, mbarrier.opened + m.barrier_latency);
    }
    if (r.kind == kBlockBarrier && warp.phase >= 0) {
      const Block& block = all_blocks[warp.block];
      if (block.phase[r.argument] == warp.phase) return kNever;  // until the last warp comes
      return std::max(time, block.opens[r.argument]);
    }
    // Products wait in a queue, so that the warp goes on.
    if (r.pipe == m.issue_only_pipe || r.kind == kProduct) return time;
    if (r.pipe == m.shared_pipe) return std::max(time, shared - m.queue);
    // A pipe that is free within the cycle takes an instruction, so that parts of cycles add up.
    const double* mine = &pipes[static_cast<size_t>(partition) * m.pipes];
    time = std::max(time, std::floor(mine[r.pipe]));
    return r.pipe == m.heavy_pipe ? std::max(time, std::floor(mine[m.fma_pipe])) : time;
  };

  while (running > 0) {
    double next = kNever;
    for (int turn = 0; turn < kPartitions; ++turn) {
      const int p = static_cast<int>((static_cast<int64_t>(now) + turn) % kPartitions);
      const std::vector<int>& mine = of_partition[p];
      const int count = static_cast<int>(mine.size());
      for (int i = 0; i < count; ++i) {
        int slot = (last[p] + 1 + i) % count;
        if (m.greedy) slot = i == 0 ? last[p] : i <= last[p] ? i - 1 : i;
        Warp& warp = warps[mine[slot]];
        const double time = ready(warp, p);
        if (time > now) {
          next = std::min(next, time);
          continue;
        }
        next = now + 1.0;
        last[p] = slot;
        const Record& r = records[warp.trace[warp.at]];
        if (r.kind == kBlockBarrier && warp.phase < 0) {
          Block& block = all_blocks[warp.block];
          warp.phase = block.phase[r.argument];
          block.wanted[r.argument] = r.warps;
          ++block.arrived[r.argument];
          block.open(r.argument, now + m.barrier_latency);
          break;
        }
        warp.phase = -1;
        if (r.kind == kArrival) {
          Block& block = all_blocks[warp.block];
          block.wanted[r.argument] = r.warps;
          ++block.arrived[r.argument];
          block.open(r.argument, now + m.barrier_latency);
        }
        if (r.kind >= kMBarrierInit && r.kind < kMBarrierWait) {
          MBarrier& mbarrier = all_blocks[warp.block].mbarriers[r.argument];
          if (r.kind == kMBarrierInit) {
            mbarrier = {r.warps, r.warps};
          } else if (r.kind == kBulkCopy) {
            operands = std::max(now, operands) + r.shared;
            busy[m.shared_pipe] += r.shared;
            mbarrier.change(r, operands + r.latency);
          } else {
            mbarrier.change(r, r.kind == kMBarrierLate ? std::max(now, warp.landed) : now);
          }
        }
        double start = now;
        if (r.pipe == m.shared_pipe) {
          start = std::max(now, shared);
          shared = start + r.busy;
          operands = std::max(now, operands) + r.busy;
        } else if (r.pipe != m.issue_only_pipe) {
          double& free = pipes[static_cast<size_t>(p) * m.pipes + r.pipe];
          free = std::max(now, free) + r.busy;
          if (r.shared > 0.0) {  // a product takes as long as its operands do
            operands = std::max(now, operands) + r.shared;
            busy[m.shared_pipe] += r.shared;
            free = std::max(free, operands);
          }
          if (r.kind == kProduct) warp.products = std::max(warp.products, free + r.latency);
        }
        busy[r.pipe] += r.busy;
        busy[m.pipes] += 1.0;
        // A result is there when the pipe has passed it on as well.
        const double extra = r.pipe == m.shared_pipe ? r.busy - 1.0 : 0.0;
        if (r.write_barrier < kBarriers) {
          double& b = warp.barriers[r.write_barrier];
          b = std::max(b, start + extra + r.latency);
        }
        if (r.read_barrier < kBarriers) {
          double& b = warp.barriers[r.read_barrier];
          b = std::max(b, start + extra + r.read);
        }
        if (r.kind == kCopy) {
          warp.copies = std::max(warp.copies, start + extra + r.latency);
          warp.landed = std::max(warp.landed, warp.copies);
        }
        if (r.kind == kCommit) {
          warp.groups.push_back(warp.copies);
          warp.copies = 0.0;
        }
        if (r.kind == kProduct && r.argument != 0) {
          all_blocks[warp.block].products[warp.group].commit(warp.product_groups++, warp.products);
          warp.products = 0.0;
        }
        warp.next = now + std::max(1, r.stall);
        if (++warp.at == warp.length) finish(warp, now + 1.0);
        break;
      }
    }
    if (next >= kNever && running > 0) return -1.0;  // no warp can go on
    now = std::max(now + 1.0, std::ceil(next));
  }
  return end;
}
