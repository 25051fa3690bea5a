// 16-bit storage types as plain bits, and which storage type a tensor has. Arithmetic is always
// fp32.
#pragma once

#include <cstdint>

namespace bert_unpad {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

enum class DType : int { kFloat32, kBFloat16, kFloat16 };

inline constexpr int element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace bert_unpad
