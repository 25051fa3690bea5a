// The part of cuBLASLt's C interface that matrix products need, and where it comes from at run
// time.
//
// The library is the one that PyTorch has loaded, of any CUDA version: one binary serves them all
// and links nothing. Building needs no cuBLASLt headers, which CPU builds of PyTorch and some
// toolkits lack. The price is this list of numbers. NVIDIA's documentation fixes them, and
// cublaslt_check_cuda.cpp compares each with the header where one is installed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace bert_unpad::cublaslt {

using Status = int;
inline constexpr Status kSuccess = 0, kInvalidValue = 7, kNotSupported = 15;

// Objects of the library.
using Handle = struct HandleObject*;
using MatmulDesc = struct MatmulDescObject*;
using Layout = struct LayoutObject*;
using Preference = struct PreferenceObject*;

struct Algorithm {
  uint64_t data[8];
};

struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

enum class DataType : int32_t {
  kFloat32 = 0,
  kFloat16 = 2,
  kBFloat16 = 14,
  kE4M3 = 28,
  kE5M2 = 29
};
enum class ComputeType : int32_t { kFloat32 = 68 };
enum class Operation : int32_t { kNone = 0, kTranspose = 1 };

enum class Epilogue : uint32_t {
  kNone = 1,
  kBias = 4,             // adds bias[row]
  kGeluAuxBias = 164,    // writes d = gelu(u) and aux = u, u = product + bias[row]
  kDGelu = 192,          // d = product * gelu'(aux)
  kBiasGradientB = 512,  // writes bias[column] = the sum of op(B)'s column
};

enum class DescAttribute : int32_t {
  kTransposeA = 3,
  kTransposeB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kAuxPointer = 11,
  kAuxLd = 12,
  kScaleA = 17,
  kScaleB = 18,
  kAuxType = 22,
  kFastAccumulation = 25,
  kBiasType = 26,
};

enum class LayoutAttribute : int32_t { kRows = 2, kCols = 3, kLd = 4 };

enum class PreferenceAttribute : int32_t {
  kMaxWorkspaceBytes = 1,
  kReductionSchemes = 3,
  kAlignmentA = 5,
  kAlignmentB = 6,
  kAlignmentC = 7,
  kAlignmentD = 8,
};

// Split products whose parts meet in the workspace, in compute or output type: what is added first
// does not depend on which block is first.
inline constexpr uint32_t kReproducibleReductions = 2 | 4;

struct Api {
  size_t (*version)();
  Status (*create)(Handle*);
  Status (*desc_create)(MatmulDesc*, ComputeType, DataType scale_type);
  Status (*desc_set)(MatmulDesc, DescAttribute, const void*, size_t);
  Status (*desc_destroy)(MatmulDesc);
  Status (*layout_create)(Layout*, DataType, uint64_t rows, uint64_t cols, int64_t ld);
  Status (*layout_set)(Layout, LayoutAttribute, const void*, size_t);
  Status (*layout_destroy)(Layout);
  Status (*preference_create)(Preference*);
  Status (*preference_set)(Preference, PreferenceAttribute, const void*, size_t);
  Status (*preference_destroy)(Preference);
  Status (*heuristics)(Handle, MatmulDesc, Layout a, Layout b, Layout c, Layout d, Preference,
                       int wanted, Heuristic*, int* found);
  Status (*matmul)(Handle, MatmulDesc, const void* alpha, const void* a, Layout, const void* b,
                   Layout, const void* beta, const void* c, Layout, void* d, Layout,
                   const Algorithm*, void* workspace, size_t workspace_bytes, cudaStream_t);
};

// Throws where PyTorch has not loaded cuBLASLt.
const Api& api();

}  // namespace bert_unpad::cublaslt
