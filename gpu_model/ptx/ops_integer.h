// Integer arithmetic and operations on bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "gpu_model/ptx/handlers.h"

namespace bert_unpad::ptx {

template <class T>
using Unsigned = std::make_unsigned_t<T>;

// Twice as wide, with the sign of T.
template <class T>
struct WiderOf {
  using Small =
      std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                         std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
  using Big = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  using type = std::conditional_t<sizeof(T) == 8, Big, Small>;
};
template <class T>
using Wider = typename WiderOf<T>::type;

template <class T>
T high_half(T x, T y) {
  return static_cast<T>(static_cast<Wider<T>>(x) * static_cast<Wider<T>>(y) >> (8 * sizeof(T)));
}
template <class T>
T low_half(T x, T y) {
  return static_cast<T>(static_cast<uint64_t>(x) * static_cast<uint64_t>(y));
}
template <class T>
T plus(T x, T y) {
  return static_cast<T>(static_cast<uint64_t>(x) + static_cast<uint64_t>(y));
}
template <class T>
T minus(T x, T y) {
  return static_cast<T>(static_cast<uint64_t>(x) - static_cast<uint64_t>(y));
}
template <class T>
T saturate(Wider<T> x) {
  return static_cast<T>(
      std::clamp<Wider<T>>(x, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
}

// Division by zero is undefined in PTX; GPUs give all bits.
template <class T>
T quotient(T x, T y) {
  if (y == 0) return static_cast<T>(-1);
  if constexpr (std::is_signed_v<T>)
    if (y == -1) return minus<T>(0, x);
  return static_cast<T>(x / y);
}
template <class T>
T remainder_of(T x, T y) {
  if (y == 0) return x;
  if constexpr (std::is_signed_v<T>)
    if (y == -1) return 0;
  return static_cast<T>(x % y);
}

// Amounts of the width and more shift everything out.
template <class T>
T shift_left(T x, uint32_t n) {
  return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<Unsigned<T>>(x) << n);
}
template <class T>
T shift_right(T x, uint32_t n) {
  constexpr uint32_t kMost = 8 * sizeof(T) - 1;
  if (std::is_unsigned_v<T> && n > kMost) return 0;
  return static_cast<T>(x >> std::min(n, kMost));
}

// A field of `length` bits from bit `position` on; signed fields are extended by their last bit.
template <class T>
T extract_field(T x, uint32_t position, uint32_t length) {
  constexpr uint32_t kMost = 8 * sizeof(T) - 1;
  position &= 255;
  length &= 255;
  const auto bits = static_cast<Unsigned<T>>(x);
  const auto sign_at = std::min(position + length - 1, kMost);
  const bool sign = std::is_signed_v<T> && length != 0 && (bits >> sign_at & 1) != 0;
  const auto ones = static_cast<Unsigned<T>>(-1);
  const Unsigned<T> mask = length > kMost ? ones : static_cast<Unsigned<T>>(~(ones << length));
  const Unsigned<T> field = shift_right<Unsigned<T>>(bits, position) & mask;
  // Bits from beyond the top of x count as its sign.
  const uint32_t have = position > kMost ? 0 : std::min(length, kMost + 1 - position);
  const Unsigned<T> fill = have > kMost ? 0 : static_cast<Unsigned<T>>(ones << have);
  return static_cast<T>(sign ? field | fill : field);
}

template <class T>
T insert_field(T field, T into, uint32_t position, uint32_t length) {
  position &= 255;
  length &= 255;
  const T ones = static_cast<T>(-1);
  const T mask = length >= 8 * sizeof(T) ? ones : static_cast<T>(~(ones << length));
  const T placed = shift_left<T>(mask, position);
  return static_cast<T>((into & ~placed) | (shift_left<T>(field, position) & placed));
}

// Of 8 bytes, those that 4 digits name; bit 3 of a digit takes the sign of the byte 8 times.
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t digits) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  uint32_t result = 0;
  for (int k = 0; k < 4; ++k) {
    const uint32_t digit = digits >> (4 * k) & 15;
    auto byte = static_cast<uint32_t>(bytes >> (8 * (digit & 7)) & 255);
    if ((digit & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;
    result |= byte << (8 * k);
  }
  return result;
}

inline uint32_t reverse_bits(uint32_t x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}

// add, sub, mul and mad on integers, without carry.
inline void decode_integer_arithmetic(Decoder& d, Statement& s, Instruction& i, Type type) {
  const bool is_mul = s.base == "mul", is_mad = s.base == "mad";
  decode_operands(d, s, i, type, 2 + is_mad);
  i.run = for_integer(type, [&]<class T>() -> Handler {
    using U = Unsigned<T>;
    if (s.base == "add") return binary<U, U, plus<U>>;
    if (s.base == "sub") return binary<U, U, minus<U>>;
    const bool high = s.take("hi");
    if (is_mul && high) return binary<T, T, high_half<T>>;
    if (is_mad && high)
      return ternary<T, T, T, [](T x, T y, T z) { return plus<T>(high_half<T>(x, y), z); }>;
    if (!s.take("lo")) return nullptr;
    if (is_mul) return binary<U, U, low_half<U>>;
    return ternary<U, U, U, [](U x, U y, U z) { return plus<U>(low_half<U>(x, y), z); }>;
  });
  if (s.take("sat")) {
    if (type != Type::kS32 || is_mul || is_mad) throw std::runtime_error(".sat is not known here");
    using Wide = int64_t;
    i.run = s.base == "add"
                ? binary<int32_t, int32_t,
                         [](int32_t x, int32_t y) { return saturate<int32_t>(Wide{x} + y); }>
                : binary<int32_t, int32_t,
                         [](int32_t x, int32_t y) { return saturate<int32_t>(Wide{x} - y); }>;
  }
}

// mul.wide and mad.wide: a result of twice the width.
inline void decode_wide(Decoder& d, Statement& s, Instruction& i, Type type) {
  const bool is_mad = s.base == "mad";
  const Type wide = bits_of(type) == 16 ? Type::kU32 : Type::kU64;
  if (bits_of(type) > 32) throw std::runtime_error("a wide product of 64-bit integers");
  i.a[0] = d.out(s.operands.at(0), wide);
  for (size_t k = 1; k <= 2; ++k) i.a[k] = d.in(s.operands.at(k), type);
  if (is_mad) i.a[3] = d.in(s.operands.at(3), wide);
  i.run = for_integer(type, [&]<class T>() -> Handler {
    if constexpr (sizeof(T) <= 4) {
      using W = Wider<T>;
      using V = Unsigned<W>;
      if (!is_mad) return binary<W, T, [](T x, T y) { return static_cast<W>(W{x} * W{y}); }>;
      return ternary<V, T, V,
                     [](T x, T y, V z) { return static_cast<V>(static_cast<V>(W{x} * W{y}) + z); }>;
    }
    return nullptr;
  });
}

// Additions whose carry goes to the next instruction, or comes from the last one. kNegate: of the
// second operand of a sub, whose carry is a borrow.
template <class T, bool kProduct, bool kHigh, bool kNegate>
void with_carry(Warp& w, const Instruction& i, uint32_t lanes) {
  const auto x = w.in<T>(i.a[1]), y = w.in<T>(i.a[2]);
  const auto z = w.in<T>(i.a[kProduct ? 3 : 2]);
  const bool uses = i.bytes != 0, sets = i.wide;
  uint32_t carries = 0;
  T sums[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const T left = !kProduct ? x[l] : kHigh ? high_half<T>(x[l], y[l]) : low_half<T>(x[l], y[l]);
    const auto in = static_cast<unsigned __int128>(uses ? w.carry >> l & 1 : 0);
    const unsigned __int128 wide_left = left, right = z[l];
    const unsigned __int128 sum = kNegate ? wide_left - right - in : wide_left + right + in;
    sums[l] = static_cast<T>(sum);
    carries |= static_cast<uint32_t>((sum >> (8 * sizeof(T)) & 1) != 0) << l;
  }
  write_lanes<T>(w.file, i.a[0], lanes, [&](int l) { return sums[l]; });
  if (sets) w.carry = (w.carry & ~lanes) | (carries & lanes);
}

inline void decode_carry(Decoder& d, Statement& s, Instruction& i, Type type) {
  const bool product = s.base.starts_with("mad"), negate = s.base.starts_with("sub");
  const bool high = s.take("hi");
  s.take("lo");
  i.wide = s.take("cc");
  i.bytes = s.base.ends_with('c') ? 1 : 0;
  decode_operands(d, s, i, type, product ? 3 : 2);
  const bool is_signed_high = high && is_signed(type);
  if (is_signed_high) throw std::runtime_error("signed high products with carry are not known");
  i.run = for_bits(type, [&]<class T>() -> Handler {
    if (product) return high ? with_carry<T, true, true, false> : with_carry<T, true, false, false>;
    return negate ? with_carry<T, false, false, true> : with_carry<T, false, false, false>;
  });
}

// Two operands of one type and a result of it.
inline void decode_integer_binary(Decoder& d, Statement& s, Instruction& i, Type type) {
  decode_operands(d, s, i, type, 2);
  i.run = for_integer(type, [&]<class T>() -> Handler {
    if (s.base == "min") return binary<T, T, [](T x, T y) { return std::min(x, y); }>;
    if (s.base == "max") return binary<T, T, [](T x, T y) { return std::max(x, y); }>;
    if (s.base == "div") return binary<T, T, quotient<T>>;
    if (s.base == "rem") return binary<T, T, remainder_of<T>>;
    return nullptr;
  });
}

inline void decode_integer_unary(Decoder& d, Statement& s, Instruction& i, Type type) {
  decode_operands(d, s, i, type, 1);
  i.run = for_integer(type, [&]<class T>() -> Handler {
    if (s.base == "neg") return unary<T, T, [](T x) { return minus<T>(0, x); }>;
    if (s.base == "abs") return unary<T, T, [](T x) { return x < 0 ? minus<T>(0, x) : x; }>;
    return nullptr;
  });
}

// and, or, xor, not, cnot; on predicates too.
inline void decode_logic(Decoder& d, Statement& s, Instruction& i) {
  const Type type = parse_type(s.take_last());
  const bool is_unary = s.base == "not" || s.base == "cnot";
  if (type == Type::kPred) {
    i.a[0] = d.predicate_out(s.operands.at(0));
    i.a[1] = d.predicate_in(s.operands.at(1));
    i.a[2] = is_unary ? i.a[1] : d.predicate_in(s.operands.at(2));
    const auto run = [&]<auto kFunction>() -> Handler {
      return [](Warp& w, const Instruction& i, uint32_t lanes) {
        write_predicate(w.file, i.a[0], lanes, kFunction(w.pred(i.a[1]), w.pred(i.a[2])));
      };
    };
    if (s.base == "and") i.run = run.operator()<[](uint32_t x, uint32_t y) { return x & y; }>();
    if (s.base == "or") i.run = run.operator()<[](uint32_t x, uint32_t y) { return x | y; }>();
    if (s.base == "xor") i.run = run.operator()<[](uint32_t x, uint32_t y) { return x ^ y; }>();
    if (s.base == "not") i.run = run.operator()<[](uint32_t x, uint32_t) { return ~x; }>();
    return;
  }
  decode_operands(d, s, i, type, is_unary ? 1 : 2);
  i.run = for_bits(type, [&]<class T>() -> Handler {
    if (s.base == "and") return binary<T, T, [](T x, T y) { return x & y; }>;
    if (s.base == "or") return binary<T, T, [](T x, T y) { return x | y; }>;
    if (s.base == "xor") return binary<T, T, [](T x, T y) { return x ^ y; }>;
    if (s.base == "not") return unary<T, T, [](T x) { return ~x; }>;
    return unary<T, T, [](T x) { return x == 0 ? 1 : 0; }>;
  });
}

template <class T, auto kShift>
void shift(Warp& w, const Instruction& i, uint32_t lanes) {
  const auto x = w.in<T>(i.a[1]);
  const auto n = w.in<uint32_t>(i.a[2]);
  write_lanes<T>(w.file, i.a[0], lanes, [&](int l) { return kShift(x[l], n[l]); });
}

inline void decode_shift(Decoder& d, Statement& s, Instruction& i) {
  const Type type = parse_type(s.take_last());
  i.a[0] = d.out(s.operands.at(0), type);
  i.a[1] = d.in(s.operands.at(1), type);
  i.a[2] = d.in(s.operands.at(2), Type::kU32);
  i.run = for_integer(type, [&]<class T>() -> Handler {
    return s.base == "shl" ? shift<T, shift_left<T>> : shift<T, shift_right<T>>;
  });
}

// shf: 64 bits shifted, of which the upper or lower half is the result.
inline void decode_funnel_shift(Decoder& d, Statement& s, Instruction& i) {
  const bool left = s.take("l"), wraps = s.take("wrap");
  if (!left && !s.take("r")) throw std::runtime_error("expected shf.l or shf.r");
  s.take("clamp");
  decode_operands(d, s, i, parse_type(s.take_last()), 3);
  const auto run = [&]<bool kLeft, bool kWraps>() -> Handler {
    return ternary<uint32_t, uint32_t, uint32_t, [](uint32_t low, uint32_t high, uint32_t n) {
      n = kWraps ? n & 31 : std::min(n, 32u);
      const uint64_t both = low | static_cast<uint64_t>(high) << 32;
      return static_cast<uint32_t>(kLeft ? both << n >> 32 : both >> n);
    }>;
  };
  if (left)
    i.run = wraps ? run.operator()<true, true>() : run.operator()<true, false>();
  else
    i.run = wraps ? run.operator()<false, true>() : run.operator()<false, false>();
}

inline void decode_field(Decoder& d, Statement& s, Instruction& i) {
  const Type type = parse_type(s.take_last());
  const bool insert = s.base == "bfi";
  i.a[0] = d.out(s.operands.at(0), type);
  size_t next = 1;
  for (; next <= (insert ? 2u : 1u); ++next) i.a[next] = d.in(s.operands.at(next), type);
  for (size_t k = 0; k < 2; ++k, ++next) i.a[next] = d.in(s.operands.at(next), Type::kU32);
  i.run = for_integer(type, [&]<class T>() -> Handler {
    if (!insert)
      return [](Warp& w, const Instruction& i, uint32_t lanes) {
        const auto x = w.in<T>(i.a[1]);
        const auto at = w.in<uint32_t>(i.a[2]), length = w.in<uint32_t>(i.a[3]);
        write_lanes<T>(w.file, i.a[0], lanes,
                       [&](int l) { return extract_field<T>(x[l], at[l], length[l]); });
      };
    if constexpr (std::is_unsigned_v<T>)
      return [](Warp& w, const Instruction& i, uint32_t lanes) {
        const auto x = w.in<T>(i.a[1]), y = w.in<T>(i.a[2]);
        const auto at = w.in<uint32_t>(i.a[3]), length = w.in<uint32_t>(i.a[4]);
        write_lanes<T>(w.file, i.a[0], lanes,
                       [&](int l) { return insert_field<T>(x[l], y[l], at[l], length[l]); });
      };
    return nullptr;
  });
}

inline void decode_permute(Decoder& d, Statement& s, Instruction& i) {
  s.take("b32");
  decode_operands(d, s, i, Type::kU32, 3);
  i.run = ternary<uint32_t, uint32_t, uint32_t, permute_bytes>;
}

// Any function of three bits: bit 4a + 2b + c of the table.
inline void decode_lop3(Decoder& d, Statement& s, Instruction& i) {
  s.take("b32");
  i.immediate = d.number(s.operands.at(4));
  s.operands.pop_back();
  decode_operands(d, s, i, Type::kU32, 3);
  i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
    const auto a = w.in<uint32_t>(i.a[1]), b = w.in<uint32_t>(i.a[2]), c = w.in<uint32_t>(i.a[3]);
    write_lanes<uint32_t>(w.file, i.a[0], lanes, [&](int l) {
      uint32_t out = 0;
      for (uint32_t row = 0; row < 8; ++row)
        if ((i.immediate >> row & 1) != 0)
          out |= ((row & 4) != 0 ? a[l] : ~a[l]) & ((row & 2) != 0 ? b[l] : ~b[l]) &
                 ((row & 1) != 0 ? c[l] : ~c[l]);
      return out;
    });
  };
}

// popc, clz, brev, bfind: counts are 32 bits whatever the operand.
inline void decode_count(Decoder& d, Statement& s, Instruction& i) {
  const bool amount = s.take("shiftamt");
  const Type type = parse_type(s.take_last());
  const bool reverse = s.base == "brev";
  i.a[0] = d.out(s.operands.at(0), reverse ? type : Type::kU32);
  i.a[1] = d.in(s.operands.at(1), type);
  i.run = for_integer(type, [&]<class T>() -> Handler {
    using U = Unsigned<T>;
    if (s.base == "popc") return unary<uint32_t, U, [](U x) { return std::popcount(x); }>;
    if (s.base == "clz") return unary<uint32_t, U, [](U x) { return std::countl_zero(x); }>;
    if (reverse && sizeof(T) == 4) return unary<uint32_t, uint32_t, reverse_bits>;
    if (reverse)
      return unary<uint64_t, uint64_t, [](uint64_t x) {
        return static_cast<uint64_t>(reverse_bits(static_cast<uint32_t>(x))) << 32 |
               reverse_bits(static_cast<uint32_t>(x >> 32));
      }>;
    // The highest bit that differs from the sign; all bits set if there is none.
    const auto find = [&]<bool kAmount>() -> Handler {
      return unary<uint32_t, T, [](T x) {
        const U bits = static_cast<U>(x < 0 ? ~x : x);
        constexpr int kMost = 8 * sizeof(T) - 1;
        const int at = kMost - std::countl_zero(bits);
        return at < 0 ? ~0u : static_cast<uint32_t>(kAmount ? kMost - at : at);
      }>;
    };
    return amount ? find.template operator()<true>() : find.template operator()<false>();
  });
}

}  // namespace bert_unpad::ptx
