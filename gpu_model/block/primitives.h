// The functions of csrc/cuda/{block,memory,async_copy,mma}.h for the model of a block: the same
// names and meaning. What each does there is written there; here, what it checks. Those of wgmma.h
// are in wgmma.h beside this.
//
// The last parameter, which callers leave out, is the place of the call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <source_location>
#include <string>
#include <utility>

#include "common/macros.h"
#include "common/types.h"
#include "gpu_model/block/convert.h"
#include "gpu_model/block/machine.h"

#define BU_REQUIRE(condition, message)                                                 \
  do {                                                                                 \
    if (!(condition))                                                                  \
      ::bert_unpad::block_model::block.fail(std::source_location::current(), message); \
  } while (false)

namespace bert_unpad {

inline void sync_block(block_model::Site site = block_model::Site::current()) {
  if (block_model::sites.pass("sync_block", site)) block_model::block.barrier(site);
}

inline uint32_t keep_in_register(uint32_t value) { return value; }
[[noreturn]] inline void leave_out() { std::abort(); }  // never called: nothing is left out here
inline void keep_loads_behind() {}

inline uint32_t take_ticket(uint32_t* counter, uint32_t last,
                            block_model::Site site = block_model::Site::current()) {
  block_model::global_memory.check(counter, sizeof(uint32_t), true, "atomic operation", site);
  const uint32_t taken = *counter;
  *counter = taken >= last ? 0 : taken + 1;
  return taken;
}

inline void sync_warp(block_model::Site site = block_model::Site::current()) {
  if (!block_model::sites.pass("sync_warp", site)) return;
  char nothing = 0;
  block_model::block.collective("sync_warp", site, nothing, [](char**) {
    ++block_model::statistics.collectives;
    block_model::block.advance_warp();
  });
}

namespace block_model {

template <class T>
T shuffle_xor(T value, int mask, const Site& site) {
  struct Lane {
    T value;
    int mask;
    T result;
  } mine{value, mask, {}};
  if (mask < 0 || mask >= static_cast<int>(kWarpSize))
    block.fail(site, "shuffle_xor with mask " + std::to_string(mask));
  block.collective("shuffle_xor", site, mine, [](Lane** lanes) {
    ++statistics.collectives;
    for (unsigned l = 0; l < kWarpSize; ++l)
      lanes[l]->result = lanes[l ^ static_cast<unsigned>(lanes[l]->mask)]->value;
  });
  return mine.result;
}

}  // namespace block_model

inline float shuffle_xor(float value, int mask,
                         block_model::Site site = block_model::Site::current()) {
  return block_model::shuffle_xor(value, mask, site);
}
inline uint32_t shuffle_xor(uint32_t value, int mask,
                            block_model::Site site = block_model::Site::current()) {
  return block_model::shuffle_xor(value, mask, site);
}

inline uint32_t first_lane(uint32_t value, block_model::Site site = block_model::Site::current()) {
  uint32_t mine = value;
  block_model::block.collective("first_lane", site, mine, [](uint32_t** lanes) {
    ++block_model::statistics.collectives;
    for (unsigned l = 1; l < block_model::kWarpSize; ++l) *lanes[l] = *lanes[0];
  });
  return mine;
}

inline uint32_t ballot(bool vote, block_model::Site site = block_model::Site::current()) {
  struct Lane {
    bool vote;
    uint32_t result;
  } mine{vote, 0};
  block_model::block.collective("ballot", site, mine, [](Lane** lanes) {
    ++block_model::statistics.collectives;
    uint32_t votes = 0;
    for (unsigned l = 0; l < block_model::kWarpSize; ++l)
      votes |= static_cast<uint32_t>(lanes[l]->vote) << l;
    for (unsigned l = 0; l < block_model::kWarpSize; ++l) lanes[l]->result = votes;
  });
  return mine.result;
}

// Far from 0, so that an offset taken for an address is out of bounds.
inline uint32_t shared_base() { return 0x01000000; }

template <class V>
V load_shared(uint32_t offset, block_model::Site site = block_model::Site::current()) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
  V value;
  block_model::shared_memory.load(offset, &value, sizeof(V), site);
  return value;
}

template <class V>
void store_shared(uint32_t offset, const V& value,
                  block_model::Site site = block_model::Site::current()) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
  block_model::shared_memory.store(offset, &value, sizeof(V), site);
}

template <class V>
V load_global(const void* p, block_model::Site site = block_model::Site::current()) {
  static_assert(sizeof(V) <= 16 && (sizeof(V) & (sizeof(V) - 1)) == 0);
  block_model::global_memory.check(p, sizeof(V), false, "load", site);
  V value;
  std::memcpy(&value, p, sizeof(V));
  return value;
}

template <class V>
void store_global(void* p, const V& value, block_model::Site site = block_model::Site::current()) {
  static_assert(sizeof(V) <= 16 && (sizeof(V) & (sizeof(V) - 1)) == 0);
  block_model::global_memory.check(p, sizeof(V), true, "store", site);
  std::memcpy(p, &value, sizeof(V));
}

namespace block_model {

// A copy may read its source at once or as late as it lands; the seed decides.
inline void copy_async(uint32_t offset, const void* source, uint32_t bytes, bool valid,
                       const Site& site) {
  shared_memory.start_copy(offset, bytes, site);
  if (reinterpret_cast<uintptr_t>(source) % bytes != 0)
    block.fail(site, "asynchronous copy of " + std::to_string(bytes) +
                         " bytes from an address that is no multiple of that");
  AsyncCopy copy{offset, bytes, 0, nullptr, {}, site};
  if (valid) {
    global_memory.check(source, bytes, false, "asynchronous copy", site);
    if ((block.random.next() & 1) != 0)
      copy.source = source;
    else
      std::memcpy(copy.data, source, bytes);
  }
  block.self->copies.start(copy);
}

}  // namespace block_model

inline void copy_async_16(uint32_t shared_offset, const void* global, bool valid,
                          block_model::Site site = block_model::Site::current()) {
  block_model::copy_async(shared_offset, global, 16, valid, site);
}

inline void copy_async_4(uint32_t shared_offset, const void* global, bool valid,
                         block_model::Site site = block_model::Site::current()) {
  block_model::copy_async(shared_offset, global, 4, valid, site);
}

inline void copy_async_commit() { block_model::block.self->copies.commit(); }

template <int kPending>
void copy_async_wait(block_model::Site site = block_model::Site::current()) {
  if (!block_model::sites.pass("copy_async_wait", site)) return;
  block_model::block.self->copies.wait(kPending, [](const block_model::AsyncCopy& copy) {
    block_model::shared_memory.land_copy(copy);
  });
}

template <class T>
uint32_t pack(float low, float high) {
  return block_model::encode<T>(low).bits | static_cast<uint32_t>(block_model::encode<T>(high).bits)
                                                << 16;
}

struct FloatPair {
  float low, high;
};

template <class T>
[[gnu::always_inline]] inline FloatPair unpack(uint32_t pair) {
  return {block_model::decode(T{static_cast<uint16_t>(pair)}),
          block_model::decode(T{static_cast<uint16_t>(pair >> 16)})};
}

namespace block_model {

struct MatrixLane {
  uint32_t* r;
  uint32_t address;
};

// Extra cycles for reading 8 rows of 16 bytes: all rows of one group of 4 banks go one by one, but
// the same row twice is read once.
inline int conflicts(MatrixLane* const* lanes) {
  int rows_of_group[8] = {}, most = 1;
  for (int row = 0; row < 8; ++row) {
    const uint32_t at = lanes[row]->address;
    int& rows = rows_of_group[at / 16 % 8];
    bool repeated = false;
    for (int other = 0; rows > 0 && other < row; ++other) repeated |= lanes[other]->address == at;
    rows += !repeated;
    most = std::max(most, rows);
  }
  return most - 1;
}

inline void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed, const Site& site) {
  MatrixLane mine{r, address};
  const auto perform = [&](MatrixLane** lanes) {
    ++statistics.collectives;
    ++statistics.load_matrices;
    const unsigned first = block.self->id / kWarpSize * kWarpSize;
    for (unsigned i = 0; i < 4; ++i) {
      uint16_t matrix[8][8];
      for (unsigned row = 0; row < 8; ++row) {
        const unsigned l = 8 * i + row;
        const Thread& thread = block.thread(first + l);
        std::memcpy(matrix[row],
                    shared_memory.load_row(lanes[l]->address - shared_base(), thread, site), 16);
      }
      statistics.bank_conflict_cycles += conflicts(lanes + 8 * i);
      if (transposed) {
        for (unsigned row = 0; row < 8; ++row)
          for (unsigned column = 0; column < row; ++column)
            std::swap(matrix[row][column], matrix[column][row]);
      }
      for (unsigned l = 0; l < kWarpSize; ++l)
        std::memcpy(&lanes[l]->r[i], &matrix[l / 4][2 * (l % 4)], 4);
    }
  };
  block.collective(transposed ? "load_matrices_transposed" : "load_matrices", site, mine, perform);
}

struct MmaLane {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

// Products of 16-bit values are exact in fp32; the sums are rounded one by one, in the order of k.
template <class T>
void multiply(MmaLane* const* lanes) {
  using Row = float __attribute__((vector_size(32)));  // GCC's and Clang's
  float left[16][16], right[16][8];
  for (unsigned l = 0; l < kWarpSize; ++l) {
    const unsigned g = l / 4, t = l % 4;
    for (unsigned i = 0; i < 4; ++i) {
      const FloatPair pair = unpack<T>(lanes[l]->a[i]);
      std::memcpy(&left[g + 8 * (i % 2)][2 * t + 8 * (i / 2)], &pair, sizeof(pair));
    }
    for (unsigned i = 0; i < 2; ++i) {
      const FloatPair pair = unpack<T>(lanes[l]->b[i]);
      right[2 * t + 8 * i][g] = pair.low;
      right[2 * t + 8 * i + 1][g] = pair.high;
    }
  }
  Row b[16];
  std::memcpy(b, right, sizeof(b));
  for (unsigned row = 0; row < 16; ++row) {
    MmaLane* const* const owners = lanes + 4 * (row % 8);
    const unsigned at = 2 * (row / 8);
    Row sum;
    for (unsigned n = 0; n < 8; ++n) sum[n] = owners[n / 2]->c[at + n % 2];
    for (unsigned k = 0; k < 16; ++k) sum += left[row][k] * b[k];
    for (unsigned n = 0; n < 8; ++n) owners[n / 2]->c[at + n % 2] = sum[n];
  }
}

template <class T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Site& site) {
  MmaLane mine{c, a, {b0, b1}};
  block.collective("mma", site, mine, [](MmaLane** lanes) {
    ++statistics.collectives;
    ++statistics.mma;
    multiply<T>(lanes);
  });
}

}  // namespace block_model

inline void load_matrices(uint32_t (&r)[4], uint32_t row_address,
                          block_model::Site site = block_model::Site::current()) {
  block_model::load_matrices(r, row_address, false, site);
}
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t row_address,
                                     block_model::Site site = block_model::Site::current()) {
  block_model::load_matrices(r, row_address, true, site);
}

template <class T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
         block_model::Site site = block_model::Site::current()) {
  block_model::mma<T>(c, a, b0, b1, site);
}

}  // namespace bert_unpad

#include "gpu_model/block/wgmma.h"
