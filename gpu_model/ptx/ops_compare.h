// setp, set, selp, slct.
#pragma once

#include <cstdint>
#include <string_view>

#include "gpu_model/ptx/ops_float.h"

namespace bert_unpad::ptx {

enum class Compare : uint8_t {
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kEqu,
  kNeu,
  kLtu,
  kLeu,
  kGtu,
  kGeu,
  kNum,
  kNan,
  kUnknown
};

inline Compare parse_compare(std::string_view name) {
  static constexpr std::string_view kNames[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                                "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
  static constexpr std::string_view kUnsigned[] = {"lo", "ls", "hi", "hs"};
  for (size_t i = 0; i < std::size(kNames); ++i)
    if (kNames[i] == name) return static_cast<Compare>(i);
  for (size_t i = 0; i < std::size(kUnsigned); ++i)
    if (kUnsigned[i] == name) return static_cast<Compare>(i + 2);
  return Compare::kUnknown;
}

// Comparisons with NaN are false, but for ne of integers' kind and those that end in u.
template <Compare kCompare, class T>
bool compare(T x, T y) {
  constexpr bool kFloat = !std::is_integral_v<T>;
  const bool unordered = kFloat && (x != x || y != y);
  switch (kCompare) {
    case Compare::kEq:
      return x == y;
    case Compare::kNe:
      return x != y && !unordered;
    case Compare::kLt:
      return x < y;
    case Compare::kLe:
      return x <= y;
    case Compare::kGt:
      return x > y;
    case Compare::kGe:
      return x >= y;
    case Compare::kEqu:
      return x == y || unordered;
    case Compare::kNeu:
      return x != y || unordered;
    case Compare::kLtu:
      return x < y || unordered;
    case Compare::kLeu:
      return x <= y || unordered;
    case Compare::kGtu:
      return x > y || unordered;
    case Compare::kGeu:
      return x >= y || unordered;
    case Compare::kNum:
      return !unordered;
    default:
      return unordered;
  }
}

// Bits per lane of a comparison; of the upper halves too where a register holds two values.
using CompareLanes = uint32_t (*)(const Warp&, uint32_t x, uint32_t y, int half);

template <Compare kCompare, class T, bool kFlush>
uint32_t compare_lanes(const Warp& w, uint32_t x, uint32_t y, int half) {
  if constexpr (std::is_same_v<T, f16> || std::is_same_v<T, bf16>) {
    const auto a = w.in<uint32_t>(x), b = w.in<uint32_t>(y);
    return lane_bits(
        [&](int l) { return compare<kCompare>(widen<T>(a[l], half), widen<T>(b[l], half)); });
  } else {
    static_cast<void>(half);
    const auto a = w.in<T>(x), b = w.in<T>(y);
    if constexpr (kFlush)
      return lane_bits([&](int l) { return compare<kCompare>(flush(a[l]), flush(b[l])); });
    else
      return lane_bits([&](int l) { return compare<kCompare>(a[l], b[l]); });
  }
}

template <class T, bool kFlush>
CompareLanes comparison_of(Compare compare) {
  static constexpr CompareLanes kAll[] = {
      compare_lanes<Compare::kEq, T, kFlush>,  compare_lanes<Compare::kNe, T, kFlush>,
      compare_lanes<Compare::kLt, T, kFlush>,  compare_lanes<Compare::kLe, T, kFlush>,
      compare_lanes<Compare::kGt, T, kFlush>,  compare_lanes<Compare::kGe, T, kFlush>,
      compare_lanes<Compare::kEqu, T, kFlush>, compare_lanes<Compare::kNeu, T, kFlush>,
      compare_lanes<Compare::kLtu, T, kFlush>, compare_lanes<Compare::kLeu, T, kFlush>,
      compare_lanes<Compare::kGtu, T, kFlush>, compare_lanes<Compare::kGeu, T, kFlush>,
      compare_lanes<Compare::kNum, T, kFlush>, compare_lanes<Compare::kNan, T, kFlush>};
  return compare == Compare::kUnknown ? nullptr : kAll[static_cast<int>(compare)];
}

inline CompareLanes comparison(Compare compare, Type type, bool flushes) {
  if (type == Type::kF32)
    return flushes ? comparison_of<float, true>(compare) : comparison_of<float, false>(compare);
  if (type == Type::kF64) return comparison_of<double, false>(compare);
  if (type == Type::kF16 || type == Type::kF16x2) return comparison_of<f16, false>(compare);
  if (type == Type::kBF16 || type == Type::kBF16x2) return comparison_of<bf16, false>(compare);
  return for_integer(type, [&]<class T>() { return comparison_of<T, false>(compare); });
}

enum class Combine : uint8_t { kNone, kAnd, kOr, kXor };

inline uint32_t combine(Combine how, uint32_t bits, uint32_t other) {
  switch (how) {
    case Combine::kAnd:
      return bits & other;
    case Combine::kOr:
      return bits | other;
    case Combine::kXor:
      return bits ^ other;
    default:
      return bits;
  }
}

// Comparisons keep in a: result, second result, operands, predicate to combine with and what that
// is xor-ed with; `bytes` says how to combine.
inline uint32_t compared(Warp& w, const Instruction& i, int half) {
  const auto function = reinterpret_cast<CompareLanes>(i.immediate);
  return function(w, i.a[2], i.a[3], half);
}
inline uint32_t other_predicate(Warp& w, const Instruction& i) {
  return i.a[4] == kNoOffset ? 0 : w.pred(i.a[4]) ^ i.a[5];
}

inline Combine take_combination(Statement& s) {
  return s.take("and")   ? Combine::kAnd
         : s.take("or")  ? Combine::kOr
         : s.take("xor") ? Combine::kXor
                         : Combine::kNone;
}

inline void decode_comparison(Decoder& d, Statement& s, Instruction& i, Type type) {
  const bool flushes = s.take("ftz");
  const Combine how = take_combination(s);
  i.bytes = static_cast<uint8_t>(how);
  i.immediate = reinterpret_cast<int64_t>(comparison(parse_compare(s.take_last()), type, flushes));
  if (i.immediate == 0) throw std::runtime_error("unknown comparison");
  i.a[2] = d.in(s.operands.at(1), type);
  i.a[3] = d.in(s.operands.at(2), type);
  i.a[4] = kNoOffset;
  if (how == Combine::kNone) return;
  std::string_view other = s.operands.at(3);
  i.a[5] = other.starts_with('!') ? ~0u : 0;
  if (other.starts_with('!')) other.remove_prefix(1);
  i.a[4] = d.predicate_in(trim(other));
}

// setp p|q: for two values in a register p is of the lower, q of the upper; otherwise q is of the
// opposite result.
inline void decode_setp(Decoder& d, Statement& s, Instruction& i) {
  const Type type = parse_type(s.take_last());
  const bool pairs = type == Type::kF16x2 || type == Type::kBF16x2;
  decode_comparison(d, s, i, type);
  const std::string_view out = s.operands[0];
  const size_t bar = out.find('|');
  const auto target = [&](std::string_view name) {
    return trim(name) == "_" ? kNoOffset : d.predicate_out(trim(name));
  };
  i.a[0] = target(out.substr(0, bar));
  i.a[1] = bar == std::string_view::npos ? kNoOffset : target(out.substr(bar + 1));
  i.wide = pairs;
  i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
    const auto how = static_cast<Combine>(i.bytes);
    const uint32_t first = compared(w, i, 0), other = other_predicate(w, i);
    const uint32_t second = i.wide ? compared(w, i, 1) : ~first;
    if (i.a[0] != kNoOffset) write_predicate(w.file, i.a[0], lanes, combine(how, first, other));
    if (i.a[1] != kNoOffset) write_predicate(w.file, i.a[1], lanes, combine(how, second, other));
  };
}

// set: all bits or 0 for integers, 1.0 or 0 for floats, in each half where there are two.
inline void decode_set(Decoder& d, Statement& s, Instruction& i) {
  const Type type = parse_type(s.take_last()), result = parse_type(s.take_last());
  const bool pairs = type == Type::kF16x2 || type == Type::kBF16x2;
  decode_comparison(d, s, i, type);
  i.a[0] = d.out(s.operands[0], result);
  i.wide = pairs;
  const uint32_t one = result == Type::kF32      ? 0x3f800000u
                       : result == Type::kF16    ? 0x3c00u
                       : result == Type::kBF16   ? 0x3f80u
                       : result == Type::kF16x2  ? 0x3c003c00u
                       : result == Type::kBF16x2 ? 0x3f803f80u
                                                 : ~0u;
  if (bits_of(result) > 32) throw std::runtime_error("set to 64 bits is not known");
  i.a[1] = d.constant(bits_of(result) == 16 ? one & 0xffff : one, false);
  i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
    const auto how = static_cast<Combine>(i.bytes);
    const uint32_t other = other_predicate(w, i);
    const uint32_t low = combine(how, compared(w, i, 0), other);
    const uint32_t high = i.wide ? combine(how, compared(w, i, 1), other) : low;
    const uint32_t one = w.in<uint32_t>(i.a[1])[0];
    write_lanes<uint32_t>(w.file, i.a[0], lanes, [&](int l) {
      const uint32_t mask =
          ((low >> l & 1) != 0 ? 0x0000ffffu : 0) | ((high >> l & 1) != 0 ? 0xffff0000u : 0);
      return one & mask;
    });
  };
}

inline void decode_select(Decoder& d, Statement& s, Instruction& i) {
  const Type type = parse_type(s.take_last());
  i.a[0] = d.out(s.operands.at(0), type);
  i.a[1] = d.in(s.operands.at(1), type);
  i.a[2] = d.in(s.operands.at(2), type);
  i.a[3] = d.predicate_in(s.operands.at(3));
  i.run = for_bits(type, [&]<class T>() -> Handler {
    return [](Warp& w, const Instruction& i, uint32_t lanes) {
      const auto x = w.in<T>(i.a[1]), y = w.in<T>(i.a[2]);
      const uint32_t p = w.pred(i.a[3]);
      write_lanes<T>(w.file, i.a[0], lanes, [&](int l) { return (p >> l & 1) != 0 ? x[l] : y[l]; });
    };
  });
}

// slct.type.{s32,f32}: the first operand where the third is not negative.
inline void decode_slct(Decoder& d, Statement& s, Instruction& i) {
  const Type sign = parse_type(s.take_last()), type = parse_type(s.take_last());
  const bool by_float = sign == Type::kF32, flushes = by_float && s.take("ftz");
  if (!by_float && sign != Type::kS32) throw std::runtime_error("expected slct by s32 or f32");
  i.a[0] = d.out(s.operands.at(0), type);
  i.a[1] = d.in(s.operands.at(1), type);
  i.a[2] = d.in(s.operands.at(2), type);
  i.a[3] = d.in(s.operands.at(3), sign);
  i.run = for_bits(type, [&]<class T>() -> Handler {
    if (flushes)
      return ternary<T, T, float, [](T x, T y, float z) { return flush(z) >= 0 ? x : y; }>;
    if (by_float) return ternary<T, T, float, [](T x, T y, float z) { return z >= 0 ? x : y; }>;
    return [](Warp& w, const Instruction& i, uint32_t lanes) {
      const auto x = w.in<T>(i.a[1]), y = w.in<T>(i.a[2]);
      const auto z = w.in<int32_t>(i.a[3]);
      write_lanes<T>(w.file, i.a[0], lanes, [&](int l) { return z[l] >= 0 ? x[l] : y[l]; });
    };
  });
}

}  // namespace bert_unpad::ptx
