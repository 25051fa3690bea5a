// Storage types of the kernels and vector loads and stores: memory holds fp32, bf16 or fp16,
// arithmetic is fp32, and a thread moves 16 bytes at a time where addresses allow it.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/types.h"
#include "cuda/primitives.h"
#include "cuda/site.h"

namespace bert_unpad {

// Elements of T in 16 bytes, the widest load of a thread.
template <class T>
inline constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

BU_DEVICE float to_float(float x) { return x; }
BU_DEVICE float to_float(bf16 x) { return unpack<bf16>(x.bits).low; }
BU_DEVICE float to_float(f16 x) { return unpack<f16>(x.bits).low; }

template <class T>
BU_DEVICE T from_float(float x) {
  return {static_cast<uint16_t>(pack<T>(x, 0.0f))};
}
template <>
BU_DEVICE float from_float<float>(float x) {
  return x;
}

template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
  T v[N];
};

template <class T, int N>
BU_DEVICE Vector<T, N> load_vector(const T* p BU_SITE) {
  return load_global<Vector<T, N>>(p BU_FROM_SITE);
}

// In pieces of 16 bytes where it has more.
template <class T, int N>
BU_DEVICE void store_vector(T* p, const float (&x)[N] BU_SITE) {
  constexpr int kPiece = N < kVectorWidth<T> ? N : kVectorWidth<T>;
  static_assert(N % kPiece == 0);
#pragma unroll
  for (int first = 0; first < N; first += kPiece) {
    if constexpr (sizeof(T) == 2 && kPiece % 2 == 0) {  // two conversions are one instruction
      Vector<uint32_t, kPiece / 2> out;
#pragma unroll
      for (int i = 0; i < kPiece / 2; ++i)
        out.v[i] = pack<T>(x[first + 2 * i], x[first + 2 * i + 1]);
      store_global(p + first, out BU_FROM_SITE);
    } else {
      Vector<T, kPiece> out;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) out.v[i] = from_float<T>(x[first + i]);
      store_global(p + first, out BU_FROM_SITE);
    }
  }
}

// Element i of a parameter vector whose dtype is known at run time only: a kernel that reads it
// once per thread need not be compiled for every dtype of it.
BU_DEVICE float load_parameter(const void* p, DType dtype, int64_t i BU_SITE) {
  switch (dtype) {
    case DType::kFloat32:
      return load_global<float>(static_cast<const float*>(p) + i BU_FROM_SITE);
    case DType::kBFloat16:
      return to_float(load_global<bf16>(static_cast<const bf16*>(p) + i BU_FROM_SITE));
    default:
      return to_float(load_global<f16>(static_cast<const f16*>(p) + i BU_FROM_SITE));
  }
}

BU_DEVICE void store_parameter(void* p, DType dtype, int64_t i, float x BU_SITE) {
  switch (dtype) {
    case DType::kFloat32:
      store_global(static_cast<float*>(p) + i, x BU_FROM_SITE);
      break;
    case DType::kBFloat16:
      store_global(static_cast<bf16*>(p) + i, from_float<bf16>(x) BU_FROM_SITE);
      break;
    default:
      store_global(static_cast<f16*>(p) + i, from_float<f16>(x) BU_FROM_SITE);
  }
}

}  // namespace bert_unpad
