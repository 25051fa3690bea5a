// Checked accesses to the state spaces, a lane at a time.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "gpu_model/ptx/block.h"

namespace bert_unpad::ptx {

enum class Space : uint8_t { kGeneric, kGlobal, kShared, kParameter, kLocal };
enum class Access : uint8_t { kLoad, kStore, kAtomic, kCopy };

inline const char* name_of(Access access) {
  static constexpr const char* kNames[] = {"load", "store", "atomic operation",
                                           "asynchronous copy"};
  return kNames[static_cast<int>(access)];
}

inline uint64_t address_of(const Warp& w, const Instruction& i, int lane) {
  if (i.wide) return w.in<uint64_t>(i.a[0])[lane] + static_cast<uint64_t>(i.immediate);
  return static_cast<uint32_t>(w.in<uint32_t>(i.a[0])[lane] + i.immediate);
}

inline Accessor accessor(const Warp& w, const Instruction& i, int lane, bool whole_warp = false) {
  return {w.id, static_cast<uint32_t>(lane), whole_warp,
          static_cast<uint32_t>(&i - w.kernel->code.data())};
}

[[noreturn]] inline void fail_conflict(const Warp& w, const Instruction& i, int lane,
                                       const SharedMemory::Conflict& conflict, const char* what) {
  using Problem = SharedMemory::Problem;
  const Accessor& earlier = conflict.earlier;
  const std::string name = what, at = "shared memory at offset " + std::to_string(conflict.offset);
  const std::string verb =
      name == "load" || name == "ldmatrix" || name == "wgmma" ? "reads " : "writes ";
  const auto fail = [&](const std::string& text) { w.fail(i, 1u << lane, text); };
  const Block& block = *w.block;
  const std::string place = block.where(earlier.pc);
  const bool is_thread = earlier.warp < block.clocks.warps();
  const std::string who =
      !is_thread ? (conflict.what == Problem::kRead ? "the wgmma at " : "the bulk copy at ") + place
                 : (earlier.whole_warp ? "the warp of " : "") +
                       block.thread_name(earlier.warp, earlier.lane) + " at " + place;
  switch (conflict.what) {
    case Problem::kNone:
      break;
    case Problem::kEmpty:
      fail(name + " of " + at + ", which was never written");
    case Problem::kPending:
      fail(name + " of " + at +
           ", destination of an asynchronous copy that was not waited for, by " + who);
    case Problem::kBarrier:
      fail(name + " of " + at + ", which is an mbarrier since " + place);
    case Problem::kHeld:
      fail(name + " of " + at + ", which the wgmma at " + place +
           " reads, and no wgmma.wait_group has waited for it");
    case Problem::kUnfenced:
      fail(name + " of " + at + ", written by " + who +
           " with no fence.proxy.async between on the way");
    case Problem::kWritten:
    case Problem::kRead:
      fail("race: " + verb + at + ", " + (conflict.what == Problem::kRead ? "read" : "written") +
           " by " + who + " with no barrier between");
  }
  throw std::logic_error("no conflict");
}

inline unsigned char* shared_bytes(Warp& w, const Instruction& i, uint64_t address, uint32_t bytes,
                                   int lane, Access access) {
  SharedMemory& shared = w.block->shared;
  const uint64_t offset = address - kSharedBase;
  if (!shared.in_range(offset, bytes)) [[unlikely]]
    w.fail(i, 1u << lane, name_of(access) + shared.range_problem(offset, bytes));
  const auto at = static_cast<uint32_t>(offset);
  const Accessor by = accessor(w, i, lane);
  SharedMemory::Conflict conflict;
  if (access == Access::kLoad)
    conflict = shared.read(at, bytes, by);
  else if (access == Access::kCopy)
    conflict = shared.start_copy(at, bytes, by);
  else
    conflict = shared.write(at, bytes, by, access == Access::kAtomic);
  if (conflict.what != SharedMemory::Problem::kNone) [[unlikely]]
    fail_conflict(w, i, lane, conflict, name_of(access));
  return shared.data(at);
}

inline unsigned char* global_bytes(Warp& w, const Instruction& i, uint64_t address, uint32_t bytes,
                                   int lane, Access access) {
  const bool write = access == Access::kStore || access == Access::kAtomic;
  Block& block = *w.block;
  if (!block.launch->buffers->allow(address, bytes, write) &&
      (write || !block.constants->allow(address, bytes, false))) [[unlikely]]
    w.fail(i, 1u << lane, block.launch->buffers->problem(name_of(access), address, bytes));
  if (block.accesses != nullptr) {
    const char* conflict =
        block.accesses->conflict(address, bytes, {block.number, w.id, block.clocks.now(w.id)},
                                 write, access == Access::kAtomic);
    if (conflict != nullptr) [[unlikely]]
      w.fail(i, 1u << lane,
             std::string("race: ") + (write ? "writes" : "reads") +
                 " global memory that another block has " + conflict);
    if (i.read_only && block.accesses->written(address, bytes)) [[unlikely]]
      w.fail(i, 1u << lane, "ld.global.nc of memory that this launch has written");
  }
  return reinterpret_cast<unsigned char*>(address);
}

// Memory of a window that is no other thread's business: parameters, and a lane's own.
inline unsigned char* window_bytes(Warp& w, const Instruction& i, uint64_t offset, uint32_t bytes,
                                   int lane, const char* what, unsigned char* data,
                                   uint64_t available) {
  if (offset % bytes != 0)
    w.fail(i, 1u << lane,
           std::string("access of ") + std::to_string(bytes) + " bytes of " + what + " at offset " +
               std::to_string(offset) + ", which is no multiple of that");
  if (offset >= available || available - offset < bytes)
    w.fail(i, 1u << lane,
           std::string("access of ") + std::to_string(bytes) + " bytes of " + what + " at offset " +
               std::to_string(static_cast<int64_t>(offset)) + ", out of bounds: there are " +
               std::to_string(available));
  return data + offset;
}

// Where `bytes` bytes at an address are; fails where they may not be accessed.
template <Space kSpace>
unsigned char* bytes_at(Warp& w, const Instruction& i, uint64_t address, uint32_t bytes, int lane,
                        Access access) {
  if constexpr (kSpace == Space::kGlobal) {
    return global_bytes(w, i, address, bytes, lane, access);
  } else if constexpr (kSpace == Space::kShared) {
    return shared_bytes(w, i, address, bytes, lane, access);
  } else if constexpr (kSpace == Space::kParameter) {
    if (access != Access::kLoad) w.fail(i, 1u << lane, "writes to a kernel's parameters");
    std::vector<unsigned char>& data = w.block->parameters;
    return window_bytes(w, i, address - kParameterBase, bytes, lane, "parameters", data.data(),
                        data.size());
  } else if constexpr (kSpace == Space::kLocal) {
    const uint32_t available = w.kernel->local_bytes;
    return window_bytes(w, i, address - kLocalBase, bytes, lane, "local memory",
                        w.local.data() + static_cast<size_t>(lane) * available, available);
  } else {
    const uint64_t window = address & ~kWindowMask, inside = address & kWindowMask;
    if (window == kSharedWindow) return shared_bytes(w, i, inside, bytes, lane, access);
    if (window == kParameterWindow)
      return bytes_at<Space::kParameter>(w, i, inside, bytes, lane, access);
    if (window == kLocalWindow) return bytes_at<Space::kLocal>(w, i, inside, bytes, lane, access);
    return global_bytes(w, i, address, bytes, lane, access);
  }
}

}  // namespace bert_unpad::ptx
