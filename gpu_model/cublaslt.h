// Stands in for cuBLASLt where its callers run without a GPU: the functions of
// csrc/linear/cublaslt.h, written from NVIDIA's documentation of cublasLtMatmul. It refuses what
// the documentation rules out (attributes of the wrong size, leading dimensions, epilogues without
// their vectors), computes in double and rounds once, and counts time by algorithm instead of
// measuring it. What a GPU's library supports beyond that, and its speed, it does not show.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <vector>

#include "gpu_model/block/convert.h"
#include "gpu_model/block/global_memory.h"
#include "linear/cublaslt.h"

namespace bert_unpad::cublaslt {

struct HandleObject {};

struct LayoutObject {
  DataType type;
  int64_t rows, cols, ld;
};

struct MatmulDescObject {
  Operation transpose_a = Operation::kNone, transpose_b = Operation::kNone;
  Epilogue epilogue = Epilogue::kNone;
  void *bias = nullptr, *aux = nullptr;
  int64_t aux_ld = 0;
  const float *scale_a = nullptr, *scale_b = nullptr;
  DataType aux_type = static_cast<DataType>(-1), bias_type = static_cast<DataType>(-1);
  int8_t fast_accumulation = 0;
};

struct PreferenceObject {
  uint64_t workspace_bytes = 0;
  uint32_t reductions = 7;
  uint32_t alignment[4] = {256, 256, 256, 256};
};

// What a test sets and reads.
struct Library {
  int algorithms = 3;
  // The last algorithm takes multiples of 128 columns of d only.
  bool last_is_choosy = false;
  // No algorithm takes it.
  Epilogue refused{};
  // Milliseconds of each algorithm; algorithm i wants i KiB of workspace.
  std::vector<float> milliseconds = {3, 1, 2};
  int64_t heuristic_calls = 0, products = 0;
  uint64_t last_algorithm = 0;
  PreferenceObject last_preference;
};
inline Library library;

namespace model {

using block_model::decode;

template <class T>
Status assign(T& target, const void* value, size_t bytes) {
  if (bytes != sizeof(T)) return kInvalidValue;
  std::memcpy(&target, value, bytes);
  return kSuccess;
}

inline int64_t bytes_of(DataType type) {
  return type == DataType::kFloat32                           ? 4
         : type == DataType::kE4M3 || type == DataType::kE5M2 ? 1
                                                              : 2;
}

inline float decode_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                    : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return x & 0x80 ? -value : value;
}

inline double load(const void* data, DataType type, int64_t i) {
  switch (type) {
    case DataType::kFloat32:
      return static_cast<const float*>(data)[i];
    case DataType::kBFloat16:
      return decode(static_cast<const bf16*>(data)[i]);
    case DataType::kFloat16:
      return decode(static_cast<const f16*>(data)[i]);
    case DataType::kE4M3:
      return decode_e4m3(static_cast<const uint8_t*>(data)[i]);
    case DataType::kE5M2:  // the upper half of a float16
      break;
  }
  return decode(f16{static_cast<uint16_t>(static_cast<const uint8_t*>(data)[i] << 8)});
}

inline void store(void* data, DataType type, int64_t i, double value) {
  const auto narrow = static_cast<float>(value);
  if (type == DataType::kFloat32) {
    static_cast<float*>(data)[i] = narrow;
  } else if (type == DataType::kBFloat16) {
    static_cast<bf16*>(data)[i] = block_model::encode<bf16>(narrow);
  } else {
    static_cast<f16*>(data)[i] = block_model::encode<f16>(narrow);
  }
}

// Every column of a matrix lies in a registered buffer.
inline void check_matrix(const void* data, const LayoutObject& layout, bool write,
                         const char* what) {
  const int64_t bytes = bytes_of(layout.type);
  for (int64_t column = 0; column < layout.cols; ++column) {
    const auto* first = static_cast<const char*>(data) + column * layout.ld * bytes;
    block_model::global_memory.check(first, static_cast<uint32_t>(bytes), write, what, {});
    block_model::global_memory.check(first + (layout.rows - 1) * bytes,
                                     static_cast<uint32_t>(bytes), write, what, {});
  }
}

inline double gelu(double u) {
  const double inner = std::sqrt(2 / M_PI) * (u + 0.044715 * u * u * u);
  return 0.5 * u * (1 + std::tanh(inner));
}
inline double gelu_derivative(double u) {
  const double inner = std::sqrt(2 / M_PI) * (u + 0.044715 * u * u * u);
  const double t = std::tanh(inner);
  return 0.5 * (1 + t) + 0.5 * u * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * u * u);
}

inline bool is_8_bit(DataType type) { return bytes_of(type) == 1; }

// Sizes of m, n, k, or false for what the documentation rules out.
inline bool fits(const MatmulDescObject& desc, const LayoutObject& a, const LayoutObject& b,
                 const LayoutObject& c, const LayoutObject& d, int64_t (&mnk)[3]) {
  const bool ta = desc.transpose_a == Operation::kTranspose;
  const bool tb = desc.transpose_b == Operation::kTranspose;
  mnk[0] = ta ? a.cols : a.rows;
  mnk[1] = tb ? b.rows : b.cols;
  mnk[2] = ta ? a.rows : a.cols;
  if (mnk[2] != (tb ? b.cols : b.rows) || d.rows != mnk[0] || d.cols != mnk[1]) return false;
  if (c.rows != d.rows || c.cols != d.cols || c.type != d.type) return false;
  for (const LayoutObject* layout : {&a, &b, &c, &d}) {
    if (layout->ld < layout->rows || layout->rows <= 0 || layout->cols <= 0) return false;
    // Tensor cores read 16 bytes at once.
    if (layout->ld * bytes_of(layout->type) % 16 != 0) return false;
  }
  if (is_8_bit(a.type)) {
    // Only the "TN" form, dimensions in multiples of 16, not both operands E5M2.
    if (!is_8_bit(b.type) || !ta || tb || mnk[0] % 16 != 0 || mnk[2] % 16 != 0) return false;
    if (a.type == DataType::kE5M2 && b.type == DataType::kE5M2) return false;
    if (desc.scale_a == nullptr || desc.scale_b == nullptr) return false;
  } else if (a.type != b.type || desc.scale_a != nullptr || desc.scale_b != nullptr ||
             desc.fast_accumulation != 0) {
    return false;
  }
  const bool needs_bias = desc.epilogue == Epilogue::kBias ||
                          desc.epilogue == Epilogue::kGeluAuxBias ||
                          desc.epilogue == Epilogue::kBiasGradientB;
  const DataType bias_type =
      is_8_bit(a.type) && d.type == DataType::kFloat32 ? DataType::kBFloat16 : d.type;
  if (needs_bias && (desc.bias == nullptr || desc.bias_type != bias_type)) return false;
  const bool needs_aux =
      desc.epilogue == Epilogue::kGeluAuxBias || desc.epilogue == Epilogue::kDGelu;
  return !needs_aux || (desc.aux != nullptr && desc.aux_type == d.type && desc.aux_ld >= d.rows &&
                        desc.aux_ld % 8 == 0);
}

inline size_t version() { return 130000; }

inline Status create(Handle* handle) {
  *handle = new HandleObject;
  return kSuccess;
}

inline Status desc_create(MatmulDesc* desc, ComputeType compute, DataType scale) {
  if (compute != ComputeType::kFloat32 || scale != DataType::kFloat32) return kInvalidValue;
  *desc = new MatmulDescObject;
  return kSuccess;
}

inline Status desc_set(MatmulDesc desc, DescAttribute attribute, const void* value, size_t bytes) {
  switch (attribute) {
    case DescAttribute::kTransposeA:
      return assign(desc->transpose_a, value, bytes);
    case DescAttribute::kTransposeB:
      return assign(desc->transpose_b, value, bytes);
    case DescAttribute::kEpilogue:
      return assign(desc->epilogue, value, bytes);
    case DescAttribute::kBiasPointer:
      return assign(desc->bias, value, bytes);
    case DescAttribute::kAuxPointer:
      return assign(desc->aux, value, bytes);
    case DescAttribute::kAuxLd:
      return assign(desc->aux_ld, value, bytes);
    case DescAttribute::kScaleA:
      return assign(desc->scale_a, value, bytes);
    case DescAttribute::kScaleB:
      return assign(desc->scale_b, value, bytes);
    case DescAttribute::kAuxType:
      return assign(desc->aux_type, value, bytes);
    case DescAttribute::kBiasType:
      return assign(desc->bias_type, value, bytes);
    case DescAttribute::kFastAccumulation:
      return assign(desc->fast_accumulation, value, bytes);
  }
  return kInvalidValue;
}

inline Status layout_create(Layout* layout, DataType type, uint64_t rows, uint64_t cols,
                            int64_t ld) {
  *layout = new LayoutObject{type, static_cast<int64_t>(rows), static_cast<int64_t>(cols), ld};
  return kSuccess;
}

inline Status layout_set(Layout layout, LayoutAttribute attribute, const void* value,
                         size_t bytes) {
  switch (attribute) {
    case LayoutAttribute::kRows:
      return assign(layout->rows, value, bytes);
    case LayoutAttribute::kCols:
      return assign(layout->cols, value, bytes);
    case LayoutAttribute::kLd:
      return assign(layout->ld, value, bytes);
  }
  return kInvalidValue;
}

inline Status preference_create(Preference* preference) {
  *preference = new PreferenceObject;
  return kSuccess;
}

inline Status preference_set(Preference preference, PreferenceAttribute attribute,
                             const void* value, size_t bytes) {
  switch (attribute) {
    case PreferenceAttribute::kMaxWorkspaceBytes:
      return assign(preference->workspace_bytes, value, bytes);
    case PreferenceAttribute::kReductionSchemes:
      return assign(preference->reductions, value, bytes);
    default: {
      const int matrix = static_cast<int>(attribute) - 5;
      if (matrix < 0 || matrix > 3) return kInvalidValue;
      return assign(preference->alignment[matrix], value, bytes);
    }
  }
}

template <class Object>
Status destroy(Object object) {
  delete object;
  return kSuccess;
}

inline bool takes(uint64_t algorithm, int64_t n) {
  const bool last = algorithm + 1 == static_cast<uint64_t>(library.algorithms);
  return !(library.last_is_choosy && last && n % 128 != 0);
}

inline Status heuristics(Handle, MatmulDesc desc, Layout a, Layout b, Layout c, Layout d,
                         Preference preference, int wanted, Heuristic* results, int* found) {
  ++library.heuristic_calls;
  library.last_preference = *preference;
  *found = 0;
  int64_t mnk[3];
  if (wanted <= 0) return kInvalidValue;
  if (desc->epilogue == library.refused || !fits(*desc, *a, *b, *c, *d, mnk)) return kNotSupported;
  for (int i = 0; i < library.algorithms && *found < wanted; ++i) {
    if (!takes(i, mnk[1])) continue;
    Heuristic& result = results[(*found)++];
    result = {};
    result.algorithm.data[0] = i;
    result.workspace_bytes = i * 1024;
    result.state = result.workspace_bytes <= preference->workspace_bytes ? kSuccess : kNotSupported;
  }
  return *found > 0 ? kSuccess : kNotSupported;
}

inline Status matmul(Handle, MatmulDesc desc, const void* alpha, const void* a, Layout a_layout,
                     const void* b, Layout b_layout, const void* beta, const void* c,
                     Layout c_layout, void* d, Layout d_layout, const Algorithm* algorithm,
                     void* workspace, size_t workspace_bytes, cudaStream_t) {
  int64_t mnk[3];
  if (!fits(*desc, *a_layout, *b_layout, *c_layout, *d_layout, mnk)) return kInvalidValue;
  if (desc->epilogue == library.refused) return kNotSupported;
  const uint64_t number = algorithm->data[0];
  if (number >= static_cast<uint64_t>(library.algorithms) || !takes(number, mnk[1]))
    return kNotSupported;
  if (workspace_bytes < number * 1024 || (number > 0 && workspace == nullptr)) return kInvalidValue;
  ++library.products;
  library.last_algorithm = number;
  block_model::clock_milliseconds += library.milliseconds[number];

  const auto [m, n, k] = mnk;
  const float scale_beta = *static_cast<const float*>(beta);
  const double scale = *static_cast<const float*>(alpha) *
                       (desc->scale_a ? static_cast<double>(*desc->scale_a) : 1.0) *
                       (desc->scale_b ? static_cast<double>(*desc->scale_b) : 1.0);
  check_matrix(a, *a_layout, false, "read");
  check_matrix(b, *b_layout, false, "read");
  check_matrix(d, *d_layout, true, "write");
  if (scale_beta != 0) check_matrix(c, *c_layout, false, "read");
  const bool ta = desc->transpose_a == Operation::kTranspose;
  const bool tb = desc->transpose_b == Operation::kTranspose;
  const auto element = [](const void* data, const LayoutObject& layout, bool transposed, int64_t i,
                          int64_t j) {
    return load(data, layout.type, transposed ? j + i * layout.ld : i + j * layout.ld);
  };
  const DataType type = d_layout->type;
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l)
        sum += element(a, *a_layout, ta, i, l) * element(b, *b_layout, tb, l, j);
      sum *= scale;
      const int64_t at = i + j * d_layout->ld, aux_at = i + j * desc->aux_ld;
      if (scale_beta != 0) sum += scale_beta * load(c, type, at);
      if (desc->epilogue == Epilogue::kBias || desc->epilogue == Epilogue::kGeluAuxBias)
        sum += load(desc->bias, desc->bias_type, i);
      if (desc->epilogue == Epilogue::kGeluAuxBias) {
        store(desc->aux, desc->aux_type, aux_at, sum);
        sum = gelu(sum);
      } else if (desc->epilogue == Epilogue::kDGelu) {
        sum *= gelu_derivative(load(desc->aux, desc->aux_type, aux_at));
      }
      store(d, type, at, sum);
    }
    if (desc->epilogue == Epilogue::kBiasGradientB) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += element(b, *b_layout, tb, l, j);
      store(desc->bias, desc->bias_type, j, sum * scale);
    }
  }
  return kSuccess;
}

}  // namespace model

inline const Api& api() {
  using namespace model;
  static const Api functions = {version,
                                create,
                                desc_create,
                                desc_set,
                                destroy<MatmulDesc>,
                                layout_create,
                                layout_set,
                                destroy<Layout>,
                                preference_create,
                                preference_set,
                                destroy<Preference>,
                                heuristics,
                                matmul};
  return functions;
}

}  // namespace bert_unpad::cublaslt
