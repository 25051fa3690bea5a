// Handlers of instructions that do the same in every lane, made of a function of the operands.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "gpu_model/ptx/decoder.h"
#include "gpu_model/ptx/warp.h"

namespace bert_unpad::ptx {

// a[0] = kFunction(a[1], ...); R: the result's type, T: the operands'.
template <class R, class T, auto kFunction>
void unary(Warp& w, const Instruction& i, uint32_t lanes) {
  const auto x = w.in<T>(i.a[1]);
  write_lanes<R>(w.file, i.a[0], lanes, [&](int l) { return static_cast<R>(kFunction(x[l])); });
}

template <class R, class T, auto kFunction>
void binary(Warp& w, const Instruction& i, uint32_t lanes) {
  const auto x = w.in<T>(i.a[1]), y = w.in<T>(i.a[2]);
  write_lanes<R>(w.file, i.a[0], lanes,
                 [&](int l) { return static_cast<R>(kFunction(x[l], y[l])); });
}

// The third operand may be of another type, that of a wide result.
template <class R, class T, class U, auto kFunction>
void ternary(Warp& w, const Instruction& i, uint32_t lanes) {
  const auto x = w.in<T>(i.a[1]), y = w.in<T>(i.a[2]);
  const auto z = w.in<U>(i.a[3]);
  write_lanes<R>(w.file, i.a[0], lanes,
                 [&](int l) { return static_cast<R>(kFunction(x[l], y[l], z[l])); });
}

// Destination and `count` operands of one type.
inline void decode_operands(Decoder& d, const Statement& s, Instruction& i, Type type,
                            size_t count) {
  if (s.operands.size() != count + 1)
    throw std::runtime_error("expected " + std::to_string(count) + " operands");
  i.a[0] = d.out(s.operands[0], type);
  for (size_t k = 1; k <= count; ++k) i.a[k] = d.in(s.operands[k], type);
}

}  // namespace bert_unpad::ptx
