// cvt and mov.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "gpu_model/ptx/ops_float.h"

namespace bert_unpad::ptx {

enum class Round : uint8_t { kNone, kNearest, kZero, kDown, kUp };

// Narrower signed integers are kept with their sign in the register's 32 bits.
template <class T>
using Kept = std::conditional_t<sizeof(T) == 8, T,
                                std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>;

template <class To, class From>
Kept<To> integer_to_integer(From x) {
  return static_cast<Kept<To>>(static_cast<To>(x));
}
template <class To, class From>
Kept<To> integer_to_integer_saturated(From x) {
  const auto wide = static_cast<__int128>(x);
  const __int128 least = std::numeric_limits<To>::min(), most = std::numeric_limits<To>::max();
  return static_cast<Kept<To>>(static_cast<To>(std::clamp(wide, least, most)));
}

template <class T>
T round_to_integer(T x, Round how) {
  switch (how) {
    case Round::kNearest:
      return std::nearbyint(x);
    case Round::kZero:
      return std::trunc(x);
    case Round::kDown:
      return std::floor(x);
    case Round::kUp:
      return std::ceil(x);
    default:
      return x;
  }
}

// To the nearest value in range; NaN is 0, or the lowest bit pattern of a sign where one of the
// types has 64 bits (PTX ISA, cvt).
template <class To, class From, Round kRound>
Kept<To> float_to_integer(From x) {
  if (is_nan(x)) {
    if (sizeof(From) < 8 && sizeof(To) < 8) return 0;
    return static_cast<Kept<To>>(static_cast<To>(uint64_t{1} << (8 * sizeof(To) - 1)));
  }
  const double rounded = round_to_integer(static_cast<double>(x), kRound);
  constexpr To kLeast = std::numeric_limits<To>::min(), kMost = std::numeric_limits<To>::max();
  if (rounded <= static_cast<double>(kLeast)) return static_cast<Kept<To>>(kLeast);
  // The largest 64-bit integers are no doubles: the bound is one above them.
  if (rounded >= static_cast<double>(kMost)) return static_cast<Kept<To>>(kMost);
  return static_cast<Kept<To>>(static_cast<To>(rounded));
}

// 16-bit floats have a register type of their own bits; fp32 and fp64 are themselves.
template <class T>
double to_double(T x) {
  if constexpr (sizeof(T) == 2)
    return block_model::decode(x);
  else
    return x;
}

template <class T>
T half_from(double x, Round how) {
  T y = block_model::encode<T>(to_odd(x));
  if (how == Round::kZero && !is_nan(x) && std::fabs(to_double(y)) > std::fabs(x)) --y.bits;
  return y;
}

template <class To, class From>
void float_to_float(Warp& w, const Instruction& i, uint32_t lanes) {
  const auto x = w.in<From>(i.a[1]);
  const auto how = static_cast<Round>(i.count);
  const bool flushes = (i.bytes & 1) != 0, saturates = (i.bytes & 2) != 0;
  const bool relu = (i.bytes & 4) != 0, to_integer = (i.bytes & 8) != 0;
  write_lanes<To>(w.file, i.a[0], lanes, [&](int l) {
    double value = to_double(x[l]);
    if (flushes && std::fabs(value) < 0x1p-126) value = std::copysign(0.0, value);
    if (to_integer) value = round_to_integer(value, how);
    if (relu && value < 0) value = 0;
    if (saturates) value = value > 0 ? std::min(value, 1.0) : 0.0;
    if constexpr (sizeof(To) == 2) {
      return half_from<To>(value, how);
    } else {
      const auto y = static_cast<To>(value);
      if constexpr (sizeof(To) == 4)
        return flushes ? flush(y) : y;
      else
        return y;
    }
  });
}

// An integer as fp64, rounded to odd where it has more bits: rounding that again is right.
template <class From>
double integer_to_odd(From x) {
  const bool negative = x < 0;
  auto magnitude = static_cast<uint64_t>(x);
  if (negative) magnitude = 0 - magnitude;
  if (magnitude >> 53 != 0)
    magnitude = (magnitude & ~uint64_t{0x7ff}) | ((magnitude & 0x7ff) != 0 ? 0x800 : 0);
  const auto y = static_cast<double>(magnitude);
  return negative ? -y : y;
}

template <class To, class From>
To integer_to_float(From x) {
  if constexpr (sizeof(To) == 2)
    return half_from<To>(integer_to_odd(x), Round::kNearest);
  else
    return static_cast<To>(x);
}

// 8-bit floats with kMantissa bits, smallest normal exponent kLeast and largest value kMost, to
// which larger ones are clamped (.satfinite).
template <int kMantissa, int kLeast, int kMost>
uint32_t encode_8(double x) {
  if (is_nan(x)) return 0x7f;
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  const double m = std::min(std::fabs(x), static_cast<double>(kMost));
  int exponent = 0;
  std::frexp(m, &exponent);
  exponent = m == 0 ? kLeast : std::max(exponent - 1, kLeast);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(m, kMantissa - exponent)));
  return sign |
         static_cast<uint32_t>(((exponent - kLeast + 1) << kMantissa) + steps - (1 << kMantissa));
}
inline uint32_t encode_e4m3(double x) { return encode_8<3, -6, 448>(x); }
inline uint32_t encode_e5m2(double x) { return encode_8<2, -14, 57344>(x); }

inline double decode_e4m3(uint32_t code) {
  const int exponent = static_cast<int>(code >> 3 & 15), mantissa = static_cast<int>(code & 7);
  if ((code & 0x7f) == 0x7f) return std::bit_cast<float>(kNan);
  const double m =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -m : m;
}
inline double decode_e5m2(uint32_t code) {
  return block_model::decode(f16{static_cast<uint16_t>(code << 8)});
}

// Of fp32 values those of a and b, a in the upper half.
template <auto kEncode, int kBits, bool kRelu>
uint32_t pack_pair(float high, float low) {
  const auto one = [](float x) { return kEncode(kRelu && x < 0 ? 0.0f : x); };
  return one(high) << kBits | one(low);
}
inline uint32_t encode_f16(float x) { return block_model::encode<f16>(x).bits; }
inline uint32_t encode_bf16(float x) { return block_model::encode<bf16>(x).bits; }
template <class T>
uint32_t encode_to_zero(float x) {
  return half_from<T>(x, Round::kZero).bits;
}

template <auto kEncode, int kBits>
Handler pair_handler(bool relu) {
  return relu ? binary<uint32_t, float, pack_pair<kEncode, kBits, true>>
              : binary<uint32_t, float, pack_pair<kEncode, kBits, false>>;
}
inline uint32_t e4m3_of(float x) { return encode_e4m3(x); }
inline uint32_t e5m2_of(float x) { return encode_e5m2(x); }

template <auto kEncode>
uint32_t pair_from_halves(uint32_t x) {
  return kEncode(widen<f16>(x, 1)) << 8 | kEncode(widen<f16>(x, 0));
}
template <auto kDecode>
uint32_t halves_from_pair(uint32_t x) {
  return narrow<f16>(kDecode(x >> 8 & 255)) << 16 | narrow<f16>(kDecode(x & 255));
}

// tf32: 10 bits of mantissa; rna: nearest, ties away from zero.
template <bool kAway>
uint32_t to_tf32(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (is_nan(x)) return kNan;
  const uint32_t half = kAway ? 0x1000u : 0xfffu + (bits >> 13 & 1);
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + half) & 0xffffe000u;
}

inline Handler packed_conversion(Type to, Type from, Round how, bool away, bool relu) {
  const bool nearest = how == Round::kNearest, zero = how == Round::kZero;
  if (from == Type::kF32 && nearest) {
    if (to == Type::kF16x2) return pair_handler<encode_f16, 16>(relu);
    if (to == Type::kBF16x2) return pair_handler<encode_bf16, 16>(relu);
    if (to == Type::kE4M3x2) return pair_handler<e4m3_of, 8>(relu);
    if (to == Type::kE5M2x2) return pair_handler<e5m2_of, 8>(relu);
  }
  if (from == Type::kF32 && zero) {
    if (to == Type::kF16x2) return pair_handler<encode_to_zero<f16>, 16>(relu);
    if (to == Type::kBF16x2) return pair_handler<encode_to_zero<bf16>, 16>(relu);
  }
  if (relu) return nullptr;
  if (from == Type::kF32 && to == Type::kTF32)
    return away      ? unary<uint32_t, float, to_tf32<true>>
           : nearest ? unary<uint32_t, float, to_tf32<false>>
                     : nullptr;
  if (!nearest) return nullptr;
  using W = uint32_t;
  if (from == Type::kF16x2 && to == Type::kE4M3x2)
    return unary<W, W, pair_from_halves<encode_e4m3>>;
  if (from == Type::kF16x2 && to == Type::kE5M2x2)
    return unary<W, W, pair_from_halves<encode_e5m2>>;
  if (from == Type::kE4M3x2 && to == Type::kF16x2)
    return unary<W, W, halves_from_pair<decode_e4m3>>;
  if (from == Type::kE5M2x2 && to == Type::kF16x2)
    return unary<W, W, halves_from_pair<decode_e5m2>>;
  return nullptr;
}

// f.operator()<T>() for any scalar type.
template <class F>
Handler for_scalar(Type type, const F& f) {
  switch (type) {
    case Type::kU8:
      return f.template operator()<uint8_t>();
    case Type::kS8:
      return f.template operator()<int8_t>();
    case Type::kF16:
      return f.template operator()<f16>();
    case Type::kBF16:
      return f.template operator()<bf16>();
    case Type::kF32:
      return f.template operator()<float>();
    case Type::kF64:
      return f.template operator()<double>();
    default:
      return for_integer(type, f);
  }
}

// From floats to integers, after kBefore: .ftz, or of 16-bit floats to fp32, which holds them all.
template <class To, class From, auto kBefore, Round kRound>
Kept<To> rounded_integer(From x) {
  const auto y = kBefore(x);
  return float_to_integer<To, std::remove_const_t<decltype(y)>, kRound>(y);
}
template <class To, class From, auto kBefore>
Handler integer_conversion(Round how) {
  switch (how) {
    case Round::kNearest:
      return unary<Kept<To>, From, rounded_integer<To, From, kBefore, Round::kNearest>>;
    case Round::kZero:
      return unary<Kept<To>, From, rounded_integer<To, From, kBefore, Round::kZero>>;
    case Round::kDown:
      return unary<Kept<To>, From, rounded_integer<To, From, kBefore, Round::kDown>>;
    case Round::kUp:
      return unary<Kept<To>, From, rounded_integer<To, From, kBefore, Round::kUp>>;
    default:
      return nullptr;
  }
}

template <class To, class From>
Handler conversion(Round how, bool to_integer, bool saturates, bool flushes) {
  constexpr bool kFromInteger = std::is_integral_v<From>, kToInteger = std::is_integral_v<To>;
  if constexpr (kFromInteger && kToInteger) {
    return saturates ? unary<Kept<To>, From, integer_to_integer_saturated<To, From>>
                     : unary<Kept<To>, From, integer_to_integer<To, From>>;
  } else if constexpr (kFromInteger) {
    return how == Round::kNearest && !saturates ? unary<To, From, integer_to_float<To, From>>
                                                : nullptr;
  } else if constexpr (kToInteger && sizeof(From) == 2) {
    return integer_conversion<To, From, [](From x) { return block_model::decode(x); }>(how);
  } else if constexpr (kToInteger) {
    if constexpr (sizeof(From) == 4)
      if (flushes) return integer_conversion<To, From, flush>(how);
    return integer_conversion<To, From, [](From x) { return x; }>(how);
  } else {
    const bool narrows = sizeof(To) < sizeof(From);
    const bool known = to_integer || (narrows ? how == Round::kNearest : how == Round::kNone) ||
                       (narrows && sizeof(To) == 2 && how == Round::kZero) ||
                       (how == Round::kNearest && sizeof(To) == sizeof(From));
    return known ? float_to_float<To, From> : nullptr;
  }
}

inline void decode_cvt(Decoder& d, Statement& s, Instruction& i) {
  const Type from = parse_type(s.take_last()), to = parse_type(s.take_last());
  const bool away = s.take("rna");
  const bool to_integer = s.take("rni") || s.take("rzi") || s.take("rmi") || s.take("rpi");
  const std::string_view text = s.text;
  const auto says = [&](const char* a, const char* b) {
    return text.find(a) != std::string_view::npos || text.find(b) != std::string_view::npos;
  };
  const Round how = says(".rni", ".rn.")   ? Round::kNearest
                    : says(".rzi", ".rz.") ? Round::kZero
                    : says(".rmi", ".rm.") ? Round::kDown
                    : says(".rpi", ".rp.") ? Round::kUp
                                           : Round::kNone;
  for (const char* name : {"rn", "rz", "rm", "rp"}) s.take(name);
  const bool flushes = s.take("ftz"), saturates = s.take("sat"), relu = s.take("relu");
  const bool finite = s.take("satfinite");
  const bool packed = to == Type::kF16x2 || to == Type::kBF16x2 || to == Type::kE4M3x2 ||
                      to == Type::kE5M2x2 || to == Type::kTF32;
  if (flushes && (packed || (from != Type::kF32 && to != Type::kF32)))
    throw std::runtime_error(".ftz is not known here");
  unsigned bits = bits_of(from);
  i.a[0] = d.out(s.operands.at(0), bits_of(to));
  i.a[1] = d.in_wider(s.operands.at(1), from, bits);
  if (bits == 64 && bits_of(from) != 64) {  // of the register's low part
    if (saturates) throw std::runtime_error("the source is too wide");
    i.run = for_scalar(from, [&]<class From>() -> Handler {
      return for_scalar(to, [&]<class To>() -> Handler {
        if constexpr (std::is_integral_v<From> && std::is_integral_v<To>)
          return unary<Kept<To>, uint64_t, integer_to_integer<To, From>>;
        else
          return nullptr;
      });
    });
    return;
  }
  if (packed) {
    if (finite != (bits_of(to) == 16)) throw std::runtime_error(".satfinite is not known here");
    if (s.operands.size() > 2) i.a[2] = d.in(s.operands[2], from);
    i.run = packed_conversion(to, from, how, away, relu);
    return;
  }
  if (finite || away) throw std::runtime_error("unknown rounding");
  i.count = static_cast<uint8_t>(how);
  i.bytes = static_cast<uint8_t>(flushes | saturates << 1 | relu << 2 | to_integer << 3);
  i.run = for_scalar(from, [&]<class From>() -> Handler {
    return for_scalar(to, [&]<class To>() -> Handler {
      return conversion<To, From>(how, to_integer, saturates, flushes);
    });
  });
}

// mov between registers, and between one register and its parts in braces.
inline void decode_mov(Decoder& d, Statement& s, Instruction& i) {
  const Type type = parse_type(s.take_last());
  const std::string_view to = s.operands.at(0), from = s.operands.at(1);
  if (type == Type::kPred) {
    i.a[0] = d.predicate_out(to);
    i.a[1] = d.predicate_in(from);
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      write_predicate(w.file, i.a[0], lanes, w.pred(i.a[1]));
    };
    return;
  }
  const bool splits = to.starts_with('{'), joins = from.starts_with('{');
  if (!splits && !joins) {
    decode_operands(d, s, i, as_bits(type), 1);
    i.run =
        for_bits(type, [&]<class T>() -> Handler { return unary<T, T, [](T x) { return x; }>; });
    return;
  }
  const auto parts = Decoder::elements(splits ? to : from);
  const unsigned bits = bits_of(type), each = bits / static_cast<unsigned>(parts.size());
  const Type part = each == 8 ? Type::kU8 : each == 16 ? Type::kU16 : Type::kU32;
  i.count = static_cast<uint8_t>(parts.size());
  i.bytes = static_cast<uint8_t>(each);
  i.wide = bits == 64;
  i.a[0] = splits ? d.in(from, as_bits(type)) : d.out(to, bits);
  for (size_t k = 0; k < parts.size(); ++k)
    i.a[1 + k] = splits ? d.out(parts[k], each) : d.in(parts[k], part);
  if (splits)
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      uint64_t whole[kLanes];
      for (int l = 0; l < kLanes; ++l)
        whole[l] = i.wide ? w.in<uint64_t>(i.a[0])[l] : w.in<uint32_t>(i.a[0])[l];
      const uint64_t mask = (uint64_t{1} << i.bytes) - 1;
      for (int k = 0; k < i.count; ++k)
        write_lanes<uint32_t>(w.file, i.a[1 + k], lanes, [&](int l) {
          return static_cast<uint32_t>(whole[l] >> (k * i.bytes) & mask);
        });
    };
  else
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      uint64_t whole[kLanes] = {};
      const uint64_t mask = (uint64_t{1} << i.bytes) - 1;
      for (int k = 0; k < i.count; ++k) {
        const auto part = w.in<uint32_t>(i.a[1 + k]);
        for (int l = 0; l < kLanes; ++l) whole[l] |= (part[l] & mask) << (k * i.bytes);
      }
      if (i.wide)
        write_lanes<uint64_t>(w.file, i.a[0], lanes, [&](int l) { return whole[l]; });
      else
        write_lanes<uint32_t>(w.file, i.a[0], lanes,
                              [&](int l) { return static_cast<uint32_t>(whole[l]); });
    };
}

}  // namespace bert_unpad::ptx
