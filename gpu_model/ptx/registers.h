// A warp's registers: 32 lanes side by side, so that an instruction is one loop that the C++
// compiler turns into vector instructions.
//
// All registers, constants and special registers of a warp lie in one file and are named by byte
// offsets. A lane takes 4 bytes, also for narrower types, or 8; a predicate is one word with a bit
// per lane.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/types.h"

namespace bert_unpad::ptx {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = ~0u;

template <class T>
using Raw = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

// A lane's bits as a value: integers, float, double, and 16-bit floats as plain bits.
template <class T>
T from_raw(Raw<T> raw) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(raw);
  else if constexpr (sizeof(T) == 2)
    return T{static_cast<uint16_t>(raw)};
  else
    return std::bit_cast<T>(raw);
}

template <class T>
Raw<T> to_raw(T value) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<Raw<T>>(static_cast<std::make_unsigned_t<T>>(value));
  else if constexpr (sizeof(T) == 2)
    return value.bits;
  else
    return std::bit_cast<Raw<T>>(value);
}

// A register that is read as lanes of T.
template <class T>
class Source {
 public:
  Source(const unsigned char* file, uint32_t offset)
      : lanes_(reinterpret_cast<const Raw<T>*>(file + offset)) {}
  T operator[](int lane) const { return from_raw<T>(lanes_[lane]); }

 private:
  const Raw<T>* lanes_;
};

// Writes f(lane) to the lanes whose bits are set. f is called for all lanes: it reads registers and
// has no side effects.
template <class T, class F>
void write_lanes(unsigned char* file, uint32_t offset, uint32_t lanes, const F& f) {
  Raw<T> values[kLanes];
  for (int l = 0; l < kLanes; ++l) values[l] = to_raw<T>(f(l));
  auto* out = reinterpret_cast<Raw<T>*>(file + offset);
  if (lanes == kAllLanes) {
    std::memcpy(out, values, sizeof(values));
    return;
  }
  for (int l = 0; l < kLanes; ++l) out[l] = (lanes >> l & 1) != 0 ? values[l] : out[l];
}

inline uint32_t& predicate(unsigned char* file, uint32_t offset) {
  return *reinterpret_cast<uint32_t*>(file + offset);
}

// A bit per lane of f(lane).
template <class F>
uint32_t lane_bits(const F& f) {
  uint32_t bits = 0;
  for (int l = 0; l < kLanes; ++l) bits |= static_cast<uint32_t>(f(l)) << l;
  return bits;
}

inline void write_predicate(unsigned char* file, uint32_t offset, uint32_t lanes, uint32_t bits) {
  uint32_t& out = predicate(file, offset);
  out = (out & ~lanes) | (bits & lanes);
}

// f(lane) for each set bit, from the lowest.
template <class F>
void for_lanes(uint32_t lanes, const F& f) {
  for (; lanes != 0; lanes &= lanes - 1) f(std::countr_zero(lanes));
}

}  // namespace bert_unpad::ptx
