// Rotary's arguments to a params struct, and its two operators, the same on CPU and GPU.
#pragma once

#include <cmath>
#include <numbers>
#include <utility>

#include "common/allocate.h"
#include "common/checks.h"
#include "rotary/angles.h"

namespace bert_unpad {

struct RotarySettings {
  int64_t heads;
  double theta;
  int64_t rotary_dim;
  bool interleaved;
  double position_scale;
  bool inverse;

  // The turn of a pair from one position to the next, in units of 2^-64.
  uint64_t step(int64_t pair) const {
    const double exponent = -2.0 * static_cast<double>(pair) / static_cast<double>(rotary_dim);
    const double turns = position_scale * std::pow(theta, exponent) / (2.0 * std::numbers::pi);
    const auto forwards = static_cast<uint64_t>(std::ldexp(turns - std::floor(turns), 64));
    return inverse ? 0 - forwards : forwards;
  }
};

// Two elements at one address would be rotated twice.
inline void check_no_overlap(const Tensor& x, const char* op) {
  int64_t inner = 1, outer = 0;
  if (x.stride(0) < x.stride(1)) std::swap(inner, outer);
  int64_t extent = x.size(2);
  for (const int64_t dim : {inner, outer}) {
    if (x.size(dim) < 2) continue;
    check(x.stride(dim) >= extent, op, ": x must have no two elements at one address, got strides ",
          x.stride(0), ", ", x.stride(1), ", ", x.stride(2), " for shape ", ShapeOf(x));
    extent += (x.size(dim) - 1) * x.stride(dim);
  }
}

// Checks everything, and fills a RotaryCpuParams or a RotaryCudaParams but for its steps.
template <class Params>
void set_rotary(Params& p, const Tensor& x, const Tensor& positions, const RotarySettings& settings,
                const char* op) {
  check_shape(x, {-1, -1, -1}, op, "x", "[tokens, heads, head_dim]");
  p.dtype = storage_dtype(x, op, "x");
  check(x.numel() == 0 || x.stride(2) == 1, op, ": x must be contiguous in its last dimension");
  check_storage(x, op, "x");
  check_shape(positions, {x.size(0)}, op, "positions", "[tokens]");
  p.wide_positions = positions.scalar_type() == ScalarType::Long;
  check(p.wide_positions || positions.scalar_type() == ScalarType::Int, op,
        ": positions must be int32 or int64");
  check_contiguous(positions, op, "positions");
  check_same_device(positions, x, op, "positions");
  const auto& [heads, theta, rotary_dim, interleaved, scale, inverse] = settings;
  check(heads >= 0 && heads <= x.size(1), op, ": heads must be between 0 and ", x.size(1),
        ", the heads of x, got ", heads);
  const int64_t most = std::min<int64_t>(x.size(2), 2 * kMaxRotaryPairs);
  check(rotary_dim >= 2 && rotary_dim <= most && rotary_dim % 2 == 0, op,
        ": rotary_dim must be even and between 2 and ", most, ", got ", rotary_dim);
  check(std::isfinite(theta) && theta > 0.0, op, ": theta must be finite and above 0, got ", theta);
  check(std::isfinite(scale) && scale > 0.0, op,
        ": position_scale must be finite and above 0, got ", scale);
  p.interleaved = interleaved;
  p.heads = heads;
  p.pairs = rotary_dim / 2;
  p.positions = positions.const_data_ptr();
  p.x = x.const_data_ptr();
  p.x_token_stride = x.stride(0);
  p.x_head_stride = x.stride(1);
}

// `out` gets what is rotated; it is x, or a new tensor.
template <class Params>
void set_rotary_out(Params& p, const Tensor& out) {
  p.out = out.mutable_data_ptr();
  p.out_token_stride = out.stride(0);
  p.out_head_stride = out.stride(1);
}

// rotate(x, out, positions, settings, op)
template <auto rotate>
void rotary_(Tensor x, Tensor positions, int64_t heads, double theta, int64_t rotary_dim,
             bool interleaved, double position_scale, bool inverse) {
  const char* op = "rotary_";
  if (x.dim() == 3 && x.numel() > 0) check_no_overlap(x, op);
  rotate(x, x, positions, {heads, theta, rotary_dim, interleaved, position_scale, inverse}, op);
}

template <auto rotate>
Tensor rotary(Tensor x, Tensor positions, int64_t heads, double theta, int64_t rotary_dim,
              bool interleaved, double position_scale, bool inverse) {
  Tensor out = allocate(x, x.sizes());
  rotate(x, out, positions, {heads, theta, rotary_dim, interleaved, position_scale, inverse},
         "rotary");
  const auto copy = [&](int64_t dim, int64_t start, Tensor to, Tensor from) {
    if (start == from.size(dim)) return;
    const int64_t length = from.size(dim) - start;
    to = torch::stable::narrow(to, dim, start, length);
    torch::stable::copy_(to, torch::stable::narrow(from, dim, start, length));
  };
  copy(1, heads, out, x);
  Tensor rotated = torch::stable::narrow(out, 1, 0, heads);
  copy(2, rotary_dim, rotated, torch::stable::narrow(x, 1, 0, heads));
  return out;
}

}  // namespace bert_unpad
