// The functions of csrc/device/{block,memory,async_copy,mma}.h for the host model: the same names
// and meaning. What each does there is written there; here, what it checks.
//
// The last parameter, which callers leave out, is the place of the call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <string>

#include "cpu/types.h"
#include "device/macros.h"
#include "host_cuda/convert.h"
#include "host_cuda/machine.h"

#define BU_REQUIRE(condition, message)                                                          \
  do {                                                                                          \
    if (!(condition)) ::bert_unpad::host::block.fail(std::source_location::current(), message); \
  } while (false)

namespace bert_unpad {

inline void sync_block(host::Site site = host::Site::current()) {
  if (host::sites.pass("sync_block", site)) host::block.barrier(site);
}

inline void sync_warp(host::Site site = host::Site::current()) {
  if (!host::sites.pass("sync_warp", site)) return;
  char nothing = 0;
  host::block.collective("sync_warp", site, nothing, [](char**) {
    ++host::statistics.collectives;
    host::block.advance_warp();
  });
}

namespace host {

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

}  // namespace host

inline float shuffle_xor(float value, int mask, host::Site site = host::Site::current()) {
  return host::shuffle_xor(value, mask, site);
}
inline uint32_t shuffle_xor(uint32_t value, int mask, host::Site site = host::Site::current()) {
  return host::shuffle_xor(value, mask, site);
}

template <class V>
V load_shared(uint32_t offset, host::Site site = host::Site::current()) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
  V value;
  host::shared_memory.load(offset, &value, sizeof(V), site);
  return value;
}

template <class V>
void store_shared(uint32_t offset, const V& value, host::Site site = host::Site::current()) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
  host::shared_memory.store(offset, &value, sizeof(V), site);
}

template <class V>
V load_global(const void* p, host::Site site = host::Site::current()) {
  static_assert(sizeof(V) <= 16 && (sizeof(V) & (sizeof(V) - 1)) == 0);
  host::global_memory.check(p, sizeof(V), false, "load", site);
  V value;
  std::memcpy(&value, p, sizeof(V));
  return value;
}

template <class V>
void store_global(void* p, const V& value, host::Site site = host::Site::current()) {
  static_assert(sizeof(V) <= 16 && (sizeof(V) & (sizeof(V) - 1)) == 0);
  host::global_memory.check(p, sizeof(V), true, "store", site);
  std::memcpy(p, &value, sizeof(V));
}

namespace host {

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

}  // namespace host

inline void copy_async_16(uint32_t shared_offset, const void* global, bool valid,
                          host::Site site = host::Site::current()) {
  host::copy_async(shared_offset, global, 16, valid, site);
}

inline void copy_async_4(uint32_t shared_offset, const void* global, bool valid,
                         host::Site site = host::Site::current()) {
  host::copy_async(shared_offset, global, 4, valid, site);
}

inline void copy_async_commit() { host::block.self->copies.commit(); }

template <int kPending>
void copy_async_wait(host::Site site = host::Site::current()) {
  if (!host::sites.pass("copy_async_wait", site)) return;
  host::block.self->copies.wait(
      kPending, [](const host::AsyncCopy& copy) { host::shared_memory.land_copy(copy); });
}

template <class T>
uint32_t pack(float low, float high) {
  return host::encode<T>(low).bits | static_cast<uint32_t>(host::encode<T>(high).bits) << 16;
}

struct FloatPair {
  float low, high;
};

template <class T>
FloatPair unpack(uint32_t pair) {
  return {host::decode(T{static_cast<uint16_t>(pair)}),
          host::decode(T{static_cast<uint16_t>(pair >> 16)})};
}

namespace host {

// Four matrices of 8 rows; matrix[i][r][c].
inline void load_matrices(uint32_t (&r)[4], uint32_t offset, bool transposed, const Site& site) {
  struct Lane {
    uint32_t* r;
    uint32_t offset;
  } mine{r, offset};
  const auto perform = [&](Lane** lanes) {
    ++statistics.collectives;
    ++statistics.load_matrices;
    for (unsigned i = 0; i < 4; ++i) {
      uint16_t matrix[8][8];
      int pieces[8] = {};  // how many rows lie in each group of 4 banks
      const unsigned first = block.self->id / kWarpSize * kWarpSize + 8 * i;
      for (unsigned row = 0; row < 8; ++row) {
        const uint32_t at = lanes[8 * i + row]->offset;
        std::memcpy(matrix[row], shared_memory.load_row(at, block.thread(first + row), site), 16);
        bool repeated = false;  // the same row twice is read once
        for (unsigned other = 0; other < row; ++other)
          repeated |= lanes[8 * i + other]->offset == at;
        pieces[at / 16 % 8] += !repeated;
      }
      statistics.bank_conflict_cycles += *std::max_element(pieces, pieces + 8) - 1;
      for (unsigned l = 0; l < kWarpSize; ++l) {
        const unsigned row = l / 4, column = 2 * (l % 4);
        const uint16_t low = transposed ? matrix[column][row] : matrix[row][column];
        const uint16_t high = transposed ? matrix[column + 1][row] : matrix[row][column + 1];
        lanes[l]->r[i] = low | static_cast<uint32_t>(high) << 16;
      }
    }
  };
  block.collective(transposed ? "load_matrices_transposed" : "load_matrices", site, mine, perform);
}

// Products of 16-bit values are exact in fp32; the sums are rounded one by one, in the order of k.
template <class T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Site& site) {
  struct Lane {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
  } mine{c, a, {b0, b1}};
  block.collective("mma", site, mine, [](Lane** lanes) {
    ++statistics.collectives;
    ++statistics.mma;
    float left[16][16], right[16][8];
    for (unsigned l = 0; l < kWarpSize; ++l) {
      const unsigned g = l / 4, t = l % 4;
      for (unsigned i = 0; i < 4; ++i) {
        const FloatPair pair = unpack<T>(lanes[l]->a[i]);
        left[g + 8 * (i % 2)][2 * t + 8 * (i / 2)] = pair.low;
        left[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + 1] = pair.high;
      }
      for (unsigned i = 0; i < 2; ++i) {
        const FloatPair pair = unpack<T>(lanes[l]->b[i]);
        right[2 * t + 8 * i][g] = pair.low;
        right[2 * t + 8 * i + 1][g] = pair.high;
      }
    }
    for (unsigned row = 0; row < 16; ++row) {
      float sum[8];
      for (unsigned n = 0; n < 8; ++n)
        sum[n] = lanes[4 * (row % 8) + n / 2]->c[2 * (row / 8) + n % 2];
      for (unsigned k = 0; k < 16; ++k)
        for (unsigned n = 0; n < 8; ++n) sum[n] += left[row][k] * right[k][n];
      for (unsigned n = 0; n < 8; ++n)
        lanes[4 * (row % 8) + n / 2]->c[2 * (row / 8) + n % 2] = sum[n];
    }
  });
}

}  // namespace host

inline void load_matrices(uint32_t (&r)[4], uint32_t row_offset,
                          host::Site site = host::Site::current()) {
  host::load_matrices(r, row_offset, false, site);
}
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t row_offset,
                                     host::Site site = host::Site::current()) {
  host::load_matrices(r, row_offset, true, site);
}

template <class T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
         host::Site site = host::Site::current()) {
  host::mma<T>(c, a, b0, b1, site);
}

}  // namespace bert_unpad
