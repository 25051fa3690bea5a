// A block's shared memory, and for each of its 4-byte words who touched it last.
//
// Two accesses of different threads, one of them a write, are a race unless a barrier lies between:
// of the block, or of the warp that both belong to. Time is counted in barriers (Block::clock), so
// the check needs no luck with the schedule: it also finds what this run happened to do in the
// right order. Shuffles, mma and load_matrices order nothing, because they do not on a GPU.
//
// Of a word's readers two are enough: of two warps where there are two, else two lanes of one warp,
// read after its last barrier. Every write that races with any reader races with one of these.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gpu_model/block/block.h"

namespace bert_unpad::block_model {

class SharedMemory {
 public:
  bool races = true;  // whether to check for them

  // All bits set is NaN in every floating-point type.
  void reset(uint32_t bytes) {
    data_.assign((bytes + 3) / 4 * 4, 0xff);
    words_.assign(data_.size() / 4, Word{});
    bytes_ = bytes;
  }

  void load(uint32_t offset, void* to, uint32_t bytes, const Site& site) {
    check_range(offset, bytes, "load", site, self());
    for (uint32_t w = offset / 4; w < (offset + bytes) / 4; ++w) read(w, self().id, site, self());
    std::memcpy(to, &data_[offset], bytes);
  }

  void store(uint32_t offset, const void* from, uint32_t bytes, const Site& site) {
    check_range(offset, bytes, "store", site, self());
    for (uint32_t w = offset / 4; w < (offset + bytes) / 4; ++w) write(w, kWritten, site);
    std::memcpy(&data_[offset], from, bytes);
  }

  // 16 bytes that `thread` points at and whose parts go to several lanes: a read by all of its
  // warp.
  const unsigned char* load_row(uint32_t offset, const Thread& thread, const Site& site) {
    check_range(offset, 16, "load_matrices", site, thread);
    for (uint32_t w = offset / 4; w < offset / 4 + 4; ++w)
      read(w, static_cast<uint16_t>(thread.id | kWholeWarp), site, thread);
    return &data_[offset];
  }

  // No thread may use the destination of an asynchronous copy until the copy lands.
  void start_copy(uint32_t offset, uint32_t bytes, const Site& site) {
    check_range(offset, bytes, "asynchronous copy", site, self());
    for (uint32_t w = offset / 4; w < (offset + bytes) / 4; ++w) write(w, kPending, site);
    std::memset(&data_[offset], 0xff, bytes);
  }

  void land_copy(const AsyncCopy& copy) {
    std::memcpy(&data_[copy.offset], copy.source != nullptr ? copy.source : copy.data, copy.bytes);
    for (uint32_t w = copy.offset / 4; w < (copy.offset + copy.bytes) / 4; ++w)
      wrote(words_[w], kWritten, copy.site);
  }

  // 16 bytes that wgmma reads for the running thread's warpgroup: whoever wrote them has fenced,
  // and a barrier lies between, also if it was one of the group.
  const unsigned char* load_async(uint32_t offset, const Site& site) {
    check_range(offset, 16, "wgmma", site, self());
    for (uint32_t w = offset / 4; w < offset / 4 + 4; ++w) read_async(w, site);
    return &data_[offset];
  }

 private:
  enum State : uint16_t { kEmpty, kWritten, kPending };
  static constexpr uint16_t kWholeWarp = 0x8000;

  struct Access {
    Site site;
    uint32_t epoch = 0;    // of the thread's warp when it happened; 0: never
    uint16_t id = 0;       // thread; with kWholeWarp: all lanes of its warp
    State state = kEmpty;  // used in `write` only

    unsigned warp() const { return (id & ~kWholeWarp) / kWarpSize; }
  };
  struct Word {
    Access write, read[2];
    uint32_t tick = 0;  // Block::tick of the write
  };

  static const Thread& self() { return *block.self; }
  static uint16_t id16() { return static_cast<uint16_t>(block.self->id); }

  // Whether a thread of the running warp may do its access without regard to `earlier`.
  static bool ordered(const Access& earlier) {
    return earlier.epoch < block.epoch ||
           (earlier.warp() == block.self->warp() && earlier.epoch < block.warp_epoch());
  }
  static bool same_thread(uint16_t a, uint16_t b) { return a == b && (a & kWholeWarp) == 0; }

  void check_range(uint32_t offset, uint32_t bytes, const char* what, const Site& site,
                   const Thread& thread) const {
    if (offset % bytes != 0 || offset >= bytes_ || bytes_ - offset < bytes) [[unlikely]]
      fail_range(offset, bytes, what, site, thread);
  }

  [[noreturn]] void fail_range(uint32_t offset, uint32_t bytes, const char* what, const Site& site,
                               const Thread& thread) const {
    const std::string text = std::string(what) + " of " + std::to_string(bytes) +
                             " bytes of shared memory at offset " + std::to_string(offset);
    if (offset % bytes != 0) block.fail(site, text + ", which is no multiple of that", &thread);
    block.fail(site, text + ", out of bounds: the block has " + std::to_string(bytes_), &thread);
  }

  void read(uint32_t w, uint16_t id, const Site& site, const Thread& thread) {
    Word& word = words_[w];
    if (word.write.state != kWritten) [[unlikely]]
      fail_unwritten(word, w, site, thread);
    if (!races) return;
    const uint32_t epoch = block.warp_epoch();
    Access& a = word.read[0];
    Access& b = word.read[1];
    if (a.id == id && a.epoch == epoch) return;  // it did so before, after the last write
    if (!same_thread(word.write.id, id) && !ordered(word.write))
      fail_race(word.write, "written", "reads", w, site, thread,
                (id & kWholeWarp) != 0 ? " (load_matrices reads for all lanes of the warp)" : "");
    const Access mine{site, epoch, id, kEmpty};
    const unsigned warp = thread.warp();
    if (a.epoch < block.epoch || (a.warp() == warp && a.epoch < epoch)) {
      // Earlier readers are on the other side of a barrier, except perhaps another warp.
      if (b.epoch < block.epoch || b.warp() == warp) b.epoch = 0;
      a = mine;
    } else if (b.epoch < block.epoch || (a.warp() == b.warp() && warp != a.warp()) ||
               (a.warp() == warp && b.warp() == warp && b.epoch < epoch)) {
      b = mine;
    }
  }

  void write(uint32_t w, State state, const Site& site) {
    Word& word = words_[w];
    if (word.write.state == kPending) fail_unwritten(word, w, site, self());
    if (races) {
      const uint16_t id = id16();
      if (!same_thread(word.write.id, id) && !ordered(word.write))
        fail_race(word.write, "written", "writes", w, site, self());
      for (const Access& reader : word.read)
        if (!same_thread(reader.id, id) && !ordered(reader))
          fail_race(reader, "read", "writes", w, site, self());
    }
    wrote(word, state, site);
    word.read[0].epoch = word.read[1].epoch = 0;
  }

  static void wrote(Word& word, State state, const Site& site) {
    word.write = {site, block.warp_epoch(), id16(), state};
    word.tick = ++block.tick;
  }

  void read_async(uint32_t w, const Site& site) {
    Word& word = words_[w];
    if (word.write.state != kWritten) fail_unwritten(word, w, site, self());
    if (!races) return;
    if (word.write.epoch >= block.epoch)
      fail_race(word.write, "written", "reads", w, site, self(), " (wgmma)");
    if (!block.fenced(block.thread(word.write.id), word.tick))
      block.fail(site, "wgmma reads shared memory at offset " + std::to_string(4 * w) +
                           ", written by " + name(word.write.id) + " at " + place(word.write.site) +
                           " with no fence_shared before the barrier");
    // Of two warps of the group, so that no write before the next barrier is ordered after both.
    const unsigned first = self().id / kGroupSize * kGroupSize;
    for (unsigned i = 0; i < 2; ++i)
      word.read[i] = {site, block.epoch,
                      static_cast<uint16_t>((first + i * kWarpSize) | kWholeWarp), kEmpty};
  }

  [[noreturn]] static void fail_unwritten(const Word& word, uint32_t w, const Site& site,
                                          const Thread& thread) {
    const std::string text = "shared memory at offset " + std::to_string(4 * w);
    if (word.write.state == kEmpty)
      block.fail(site, text + " was never written (uninitialised)", &thread);
    block.fail(site,
               text + " is the destination of an asynchronous copy that was not waited for, of " +
                   name(word.write.id) + " at " + place(word.write.site),
               &thread);
  }

  [[noreturn]] static void fail_race(const Access& earlier, const char* done, const char* does,
                                     uint32_t w, const Site& site, const Thread& thread,
                                     const char* hint = "") {
    block.fail(site,
               "race: " + std::string(does) + " shared memory at offset " + std::to_string(4 * w) +
                   ", " + done + " by " + name(earlier.id) + " at " + place(earlier.site) +
                   " with no barrier between" + hint,
               &thread);
  }

  static std::string name(uint16_t id) {
    const uint3& t = block.thread(id & ~kWholeWarp).index;
    return ((id & kWholeWarp) != 0 ? "the warp of thread " : "thread ") + triple(t.x, t.y, t.z);
  }

  std::vector<unsigned char> data_;
  std::vector<Word> words_;
  uint32_t bytes_ = 0;
};

inline SharedMemory shared_memory;

}  // namespace bert_unpad::block_model
