// Checks of clip_bucket_'s arguments, the same on CPU and GPU.
#pragma once

#include <cmath>
#include <optional>

#include "common/checks.h"

namespace bert_unpad {

struct ClipArguments {
  DType dtype, out_dtype;
  int64_t size;
  const void* bucket;
  void* out;
  float* residual = nullptr;
  const float* bound = nullptr;  // a factor of max_norm, on the bucket's device
  float max_norm, factor;
};

inline ClipArguments clip_arguments(const char* op, const Tensor& bucket, const Tensor& out,
                                    const std::optional<Tensor>& residual, double max_norm,
                                    const std::optional<Tensor>& bound, double factor) {
  ClipArguments a{};
  a.dtype = storage_dtype(bucket, op, "bucket");
  check_contiguous(bucket, op, "bucket");
  a.out_dtype = storage_dtype(out, op, "out");
  check_contiguous(out, op, "out");
  check_same_device(out, bucket, op, "out");
  a.size = bucket.numel();
  check(out.numel() == a.size, op, ": out must have as many elements as bucket, ", a.size, ", got ",
        out.numel());
  a.bucket = bucket.const_data_ptr();
  a.out = out.mutable_data_ptr();
  const auto* begin = static_cast<const char*>(a.bucket);
  const auto* out_begin = static_cast<const char*>(a.out);
  const bool apart = begin + a.size * element_size(a.dtype) <= out_begin ||
                     out_begin + a.size * element_size(a.out_dtype) <= begin;
  check(a.size == 0 || apart || (a.bucket == a.out && a.dtype == a.out_dtype), op,
        ": out must be the bucket itself or memory apart from it");
  check(a.dtype == a.out_dtype || a.dtype == DType::kFloat32 || a.out_dtype == DType::kFloat32, op,
        ": out must have the bucket's dtype, or one of the two must be float32");
  if (residual) {
    check(a.dtype == DType::kFloat32 && a.out_dtype != DType::kFloat32, op,
          ": residual needs a float32 bucket and a bfloat16 or float16 out");
    check_dtype(*residual, ScalarType::Float, op, "residual", "float32");
    check_contiguous(*residual, op, "residual");
    check_same_device(*residual, bucket, op, "residual");
    check(residual->numel() == a.size, op, ": residual must have as many elements as bucket, ",
          a.size, ", got ", residual->numel());
    a.residual = static_cast<float*>(residual->mutable_data_ptr());
  }
  if (bound) {
    check_scalar(*bound, ScalarType::Float, bucket, op, "bound", "float32");
    a.bound = static_cast<const float*>(bound->const_data_ptr());
  }
  check(max_norm >= 0.0, op, ": max_norm must be at least 0, got ", max_norm);
  check(factor > 0.0 && std::isfinite(factor), op, ": factor must be positive and finite, got ",
        factor);
  a.max_norm = static_cast<float>(max_norm);
  a.factor = static_cast<float>(factor);
  return a;
}

}  // namespace bert_unpad
