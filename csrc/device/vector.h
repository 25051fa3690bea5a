// Storage types of the kernels and vector loads and stores: memory holds fp32, bf16 or fp16,
// arithmetic is fp32, and a thread moves 16 bytes at a time where addresses allow it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cpu/types.h"
#include "device/macros.h"

namespace bert_unpad {

// Elements of T in 16 bytes, the widest load of a thread.
template <class T>
inline constexpr int kVectorWidth = 16 / static_cast<int>(sizeof(T));

BU_DEVICE float to_float(float x) { return x; }
BU_DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
BU_DEVICE float to_float(__half x) { return __half2float(x); }

template <class T>
BU_DEVICE T from_float(float x);
template <>
BU_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
BU_DEVICE __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
BU_DEVICE __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
  T v[N];
};

template <class T, int N>
BU_DEVICE Vector<T, N> load_vector(const T* p) {
  return *reinterpret_cast<const Vector<T, N>*>(p);
}

template <class T, int N>
BU_DEVICE void store_vector(T* p, const float (&x)[N]) {
  Vector<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.v[i] = from_float<T>(x[i]);
  *reinterpret_cast<Vector<T, N>*>(p) = out;
}

// Element i of a parameter vector whose dtype is known at run time only: a kernel that reads it
// once per thread need not be compiled for every dtype of it.
BU_DEVICE float load_parameter(const void* p, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(p)[i];
    case DType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(p)[i]);
    default:
      return to_float(static_cast<const __half*>(p)[i]);
  }
}

BU_DEVICE void store_parameter(void* p, DType dtype, int64_t i, float x) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(p)[i] = x;
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(p)[i] = from_float<__nv_bfloat16>(x);
      break;
    default:
      static_cast<__half*>(p)[i] = from_float<__half>(x);
  }
}

}  // namespace bert_unpad
