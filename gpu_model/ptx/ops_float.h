// Floating-point arithmetic: fp32 and fp64 as IEEE 754 has them, fp16 and bf16 by way of fp64, and
// the approximations, which are exact to the last bit or so here.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>

#include "gpu_model/block/convert.h"
#include "gpu_model/ptx/handlers.h"

namespace bert_unpad::ptx {

inline constexpr uint32_t kNan = 0x7fffffff;

inline bool is_nan(float x) { return x != x; }
inline bool is_nan(double x) { return x != x; }

// .ftz: subnormals count as zeros of their sign.
inline float flush(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return (bits & 0x7f800000u) == 0 ? std::bit_cast<float>(bits & 0x80000000u) : x;
}

// NaN loses against numbers, and -0 against +0.
template <class T>
T larger(T x, T y) {
  if (is_nan(x)) return is_nan(y) ? static_cast<T>(std::bit_cast<float>(kNan)) : y;
  if (is_nan(y)) return x;
  if (x == y) return std::signbit(x) ? y : x;
  return x > y ? x : y;
}
template <class T>
T smaller(T x, T y) {
  return is_nan(x) && is_nan(y) ? larger(x, y) : -larger<T>(-x, -y);
}
// .NaN: it wins.
template <class T>
T larger_nan(T x, T y) {
  return is_nan(x) || is_nan(y) ? static_cast<T>(std::bit_cast<float>(kNan)) : larger(x, y);
}
template <class T>
T smaller_nan(T x, T y) {
  return is_nan(x) || is_nan(y) ? static_cast<T>(std::bit_cast<float>(kNan)) : smaller(x, y);
}

// .sat: to [0, 1], NaN to 0.
inline float to_unit(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }

// The functions by name, as types, so that each can be made for fp32 with and without .ftz and .sat
// and for other types.
using Add = std::plus<>;
using Sub = std::minus<>;
using Mul = std::multiplies<>;
using Div = std::divides<>;
using Max = decltype([](auto x, auto y) { return larger(x, y); });
using Min = decltype([](auto x, auto y) { return smaller(x, y); });
using MaxNan = decltype([](auto x, auto y) { return larger_nan(x, y); });
using MinNan = decltype([](auto x, auto y) { return smaller_nan(x, y); });
using Fma = decltype([](auto x, auto y, auto z) { return std::fma(x, y, z); });
using Reciprocal = decltype([](auto x) { return 1 / x; });
using Sqrt = decltype([](auto x) { return std::sqrt(x); });
using Rsqrt = decltype([](auto x) { return 1 / std::sqrt(x); });
using Exp2 = decltype([](auto x) { return std::exp2(x); });
using Log2 = decltype([](auto x) { return std::log2(x); });
using Sin = decltype([](auto x) { return std::sin(x); });
using Cos = decltype([](auto x) { return std::cos(x); });
using Tanh = decltype([](auto x) { return std::tanh(x); });
using Neg = decltype([](auto x) { return -x; });
using Abs = decltype([](auto x) { return std::fabs(x); });

template <class F, class... T>
double apply(T... x) {
  return F{}(x...);
}
template <class F, bool kFlush, bool kSaturate, class... T>
float single(T... x) {
  float y = kFlush ? flush(F{}(flush(x)...)) : F{}(x...);
  return kSaturate ? to_unit(y) : y;
}

template <class F, size_t kCount, bool kFlush, bool kSaturate>
constexpr Handler single_handler() {
  if constexpr (kCount == 1)
    return unary<float, float, single<F, kFlush, kSaturate, float>>;
  else if constexpr (kCount == 2)
    return binary<float, float, single<F, kFlush, kSaturate, float, float>>;
  else
    return ternary<float, float, float, single<F, kFlush, kSaturate, float, float, float>>;
}

// x * y + z of 16-bit floats in fp64, rounded to odd: the product is exact, and the sum may have
// parts too far apart for fp64.
inline double fma_to_odd(double x, double y, double z) {
  const double product = x * y, sum = product + z, added = sum - product;
  const double error = (product - (sum - added)) + (z - added);
  if (std::isinf(sum) || is_nan(sum) || error == 0) return sum;
  const auto bits = std::bit_cast<uint64_t>(sum);
  const bool larger = (error > 0) == (sum > 0);
  return std::bit_cast<double>((bits & 1) ? bits : larger ? bits + 1 : bits - 1);
}

// 16-bit floats, one or two in a register: in fp64, then rounded once.
template <class T>
double widen(uint32_t word, int n) {
  return block_model::decode(T{static_cast<uint16_t>(word >> (16 * n))});
}
// An fp64 value to fp32, rounded to odd: rounding that to 16 bits again is right.
inline float to_odd(double x) {
  const auto y = static_cast<float>(x);
  const double back = y;
  if (back == x || is_nan(y) || std::isinf(x)) return y;
  // Toward zero, then the last bit set.
  auto bits = std::bit_cast<uint32_t>(y);
  if (std::fabs(back) > std::fabs(x)) --bits;
  return std::bit_cast<float>(bits | 1);
}
template <class T>
uint32_t narrow(double x) {
  return block_model::encode<T>(to_odd(x)).bits;
}

template <class F, class T, int kHalves, class... Words>
uint32_t halves(Words... words) {
  uint32_t result = 0;
  for (int n = 0; n < kHalves; ++n) {
    double exact;
    if constexpr (std::is_same_v<F, Fma>)
      exact = fma_to_odd(widen<T>(words, n)...);
    else
      exact = F{}(widen<T>(words, n)...);
    result |= narrow<T>(exact) << (16 * n);
  }
  return result;
}

template <class F, size_t kCount, class T, int kHalves>
constexpr Handler half_handler() {
  using W = uint32_t;
  if constexpr (kCount == 1)
    return unary<W, W, halves<F, T, kHalves, W>>;
  else if constexpr (kCount == 2)
    return binary<W, W, halves<F, T, kHalves, W, W>>;
  else
    return ternary<W, W, W, halves<F, T, kHalves, W, W, W>>;
}

template <class F, size_t kCount>
Handler float_handler(Type type, bool flushes, bool saturates) {
  switch (type) {
    case Type::kF32:
      if (saturates)
        return flushes ? single_handler<F, kCount, true, true>()
                       : single_handler<F, kCount, false, true>();
      return flushes ? single_handler<F, kCount, true, false>()
                     : single_handler<F, kCount, false, false>();
    case Type::kF64:
      if (saturates || flushes) return nullptr;
      if constexpr (kCount == 1)
        return unary<double, double, apply<F, double>>;
      else if constexpr (kCount == 2)
        return binary<double, double, apply<F, double, double>>;
      else
        return ternary<double, double, double, apply<F, double, double, double>>;
    default:
      break;
  }
  if (saturates || flushes) return nullptr;
  if (type == Type::kF16) return half_handler<F, kCount, f16, 1>();
  if (type == Type::kBF16) return half_handler<F, kCount, bf16, 1>();
  if (type == Type::kF16x2) return half_handler<F, kCount, f16, 2>();
  if (type == Type::kBF16x2) return half_handler<F, kCount, bf16, 2>();
  return nullptr;
}

// neg and abs change the sign bit alone, also of NaN.
template <class T, bool kNegate>
T change_sign(T x) {
  constexpr T kSigns = sizeof(T) == 8   ? static_cast<T>(uint64_t{1} << 63)
                       : sizeof(T) == 4 ? static_cast<T>(0x80000000u)
                                        : static_cast<T>(0x8000u);
  return static_cast<T>(kNegate ? x ^ kSigns : x & static_cast<T>(~kSigns));
}
inline uint32_t change_signs(uint32_t x, bool negate) {
  return negate ? x ^ 0x80008000u : x & 0x7fff7fffu;
}

inline Handler sign_handler(Type type, bool negate, bool flushes) {
  if (type == Type::kF32 && flushes)
    return negate ? single_handler<Neg, 1, true, false>() : single_handler<Abs, 1, true, false>();
  if (flushes) return nullptr;
  if (type == Type::kF16x2 || type == Type::kBF16x2)
    return negate ? unary<uint32_t, uint32_t, [](uint32_t x) { return change_signs(x, true); }>
                  : unary<uint32_t, uint32_t, [](uint32_t x) { return change_signs(x, false); }>;
  return for_bits(type, [&]<class T>() -> Handler {
    return negate ? unary<T, T, change_sign<T, true>> : unary<T, T, change_sign<T, false>>;
  });
}

// All floating-point arithmetic but comparisons and conversions.
inline void decode_float(Decoder& d, Statement& s, Instruction& i, Type type) {
  const std::string_view op = s.base;
  const bool ternary_op = op == "fma" || op == "mad";
  const bool binary_op =
      op == "add" || op == "sub" || op == "mul" || op == "div" || op == "max" || op == "min";
  decode_operands(d, s, i, type, ternary_op ? 3 : binary_op ? 2 : 1);
  // rn is the rounding of a CPU; others are refused.
  s.take("rn");
  s.take("approx");
  s.take("full");
  const bool flushes = s.take("ftz"), saturates = s.take("sat"), with_nan = s.take("NaN");
  const auto make = [&]<class F, size_t kCount>() {
    return float_handler<F, kCount>(type, flushes, saturates);
  };
  if (ternary_op) i.run = make.operator()<Fma, 3>();
  if (op == "add") i.run = make.operator()<Add, 2>();
  if (op == "sub") i.run = make.operator()<Sub, 2>();
  if (op == "mul") i.run = make.operator()<Mul, 2>();
  if (op == "div") i.run = make.operator()<Div, 2>();
  if (op == "max") i.run = with_nan ? make.operator()<MaxNan, 2>() : make.operator()<Max, 2>();
  if (op == "min") i.run = with_nan ? make.operator()<MinNan, 2>() : make.operator()<Min, 2>();
  if (op == "rcp") i.run = make.operator()<Reciprocal, 1>();
  if (op == "sqrt") i.run = make.operator()<Sqrt, 1>();
  if (op == "rsqrt") i.run = make.operator()<Rsqrt, 1>();
  if (op == "ex2") i.run = make.operator()<Exp2, 1>();
  if (op == "lg2") i.run = make.operator()<Log2, 1>();
  if (op == "sin") i.run = make.operator()<Sin, 1>();
  if (op == "cos") i.run = make.operator()<Cos, 1>();
  if (op == "tanh") i.run = make.operator()<Tanh, 1>();
  if (op == "neg" || op == "abs") i.run = sign_handler(type, op == "neg", flushes);
}

}  // namespace bert_unpad::ptx
