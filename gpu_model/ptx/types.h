// PTX's type names, and handlers chosen by them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string_view>

#include "common/types.h"

namespace bert_unpad::ptx {

// Untyped bits (.b32) count as unsigned integers.
enum class Type : uint8_t {
  kNone,
  kPred,
  kU8,
  kS8,
  kU16,
  kS16,
  kU32,
  kS32,
  kU64,
  kS64,
  kF16,
  kBF16,
  kF16x2,
  kBF16x2,
  kTF32,
  kF32,
  kF64,
  kE4M3x2,
  kE5M2x2
};

inline Type parse_type(std::string_view name) {
  struct Row {
    std::string_view name;
    Type type;
  };
  static constexpr Row kRows[] = {
      {"pred", Type::kPred},     {"u8", Type::kU8},         {"s8", Type::kS8},
      {"b8", Type::kU8},         {"u16", Type::kU16},       {"s16", Type::kS16},
      {"b16", Type::kU16},       {"u32", Type::kU32},       {"s32", Type::kS32},
      {"b32", Type::kU32},       {"u64", Type::kU64},       {"s64", Type::kS64},
      {"b64", Type::kU64},       {"f16", Type::kF16},       {"bf16", Type::kBF16},
      {"f16x2", Type::kF16x2},   {"bf16x2", Type::kBF16x2}, {"tf32", Type::kTF32},
      {"f32", Type::kF32},       {"f64", Type::kF64},       {"e4m3x2", Type::kE4M3x2},
      {"e5m2x2", Type::kE5M2x2},
  };
  for (const Row& row : kRows)
    if (row.name == name) return row.type;
  return Type::kNone;
}

inline unsigned bits_of(Type type) {
  switch (type) {
    case Type::kNone:
      throw std::runtime_error("unknown type");
    case Type::kU8:
    case Type::kS8:
      return 8;
    case Type::kU16:
    case Type::kS16:
    case Type::kF16:
    case Type::kBF16:
    case Type::kE4M3x2:
    case Type::kE5M2x2:
      return 16;
    case Type::kU64:
    case Type::kS64:
    case Type::kF64:
      return 64;
    default:
      return 32;
  }
}

inline bool is_float(Type type) { return type >= Type::kF16; }
inline bool is_signed(Type type) {
  return type == Type::kS8 || type == Type::kS16 || type == Type::kS32 || type == Type::kS64;
}

// What is the same for signed and unsigned integers, is done on unsigned ones.
inline Type as_bits(Type type) {
  switch (bits_of(type)) {
    case 8:
      return Type::kU8;
    case 16:
      return Type::kU16;
    case 64:
      return Type::kU64;
    default:
      return Type::kU32;
  }
}

// f.operator()<T>() for the C++ type of an integer type of 16 bits or more; null for others.
template <class F>
auto for_integer(Type type, const F& f) -> decltype(f.template operator()<uint32_t>()) {
  switch (type) {
    case Type::kU16:
      return f.template operator()<uint16_t>();
    case Type::kS16:
      return f.template operator()<int16_t>();
    case Type::kU32:
      return f.template operator()<uint32_t>();
    case Type::kS32:
      return f.template operator()<int32_t>();
    case Type::kU64:
      return f.template operator()<uint64_t>();
    case Type::kS64:
      return f.template operator()<int64_t>();
    default:
      return nullptr;
  }
}

// The same for unsigned integers, whatever the sign.
template <class F>
auto for_bits(Type type, const F& f) -> decltype(f.template operator()<uint32_t>()) {
  switch (as_bits(type)) {
    case Type::kU16:
      return f.template operator()<uint16_t>();
    case Type::kU64:
      return f.template operator()<uint64_t>();
    case Type::kU32:
      return f.template operator()<uint32_t>();
    default:
      return nullptr;
  }
}

}  // namespace bert_unpad::ptx
