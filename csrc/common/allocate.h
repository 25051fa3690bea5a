// Tensors whose numbers are not set yet, contiguous, on the device of another one.
//
// As `new_empty` and `empty_like` of torch::stable, in a third of the time: these go through
// PyTorch's dispatcher boxed.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>

#include "common/checks.h"

namespace bert_unpad {

inline Tensor allocate(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                       std::optional<ScalarType> dtype = std::nullopt) {
  constexpr size_t kMostDims = 8;
  check(sizes.size() <= kMostDims, "expected at most ", kMostDims, " dimensions, got ",
        sizes.size());
  std::array<int64_t, kMostDims> strides;
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
  int32_t type = static_cast<int32_t>(dtype.value_or(ScalarType::Undefined)), device, index;
  if (!dtype) TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), type, device, index, &made));
  return Tensor(made);
}

inline Tensor allocate_like(const Tensor& like) { return allocate(like, like.sizes()); }

}  // namespace bert_unpad
