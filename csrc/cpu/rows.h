// What the bindings of row-wise operators share: how rows are split over threads, fp32 copies of
// parameter vectors, and column sums whose bits do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/allocate.h"
#include "common/checks.h"
#include "cpu/parallel.h"

namespace bert_unpad {

// Columns of fp32 rows in scratch memory are padded to a multiple of this (the widest vector), so
// that only activations need tail handling.
inline constexpr int64_t kRowPadding = 16;
// Dropout words of a row are padded to the columns that one AVX-512 Philox call covers.
inline constexpr int64_t kWordPadding = 256;

inline int64_t padded_columns(int64_t n) {
  return (n + kRowPadding - 1) / kRowPadding * kRowPadding;
}

// Floats that the 16-bit dropout words of a row take.
inline int64_t word_floats(int64_t n) {
  return (n + kWordPadding - 1) / kWordPadding * kWordPadding / 2;
}

// Runs of rows; a pure function of the number of rows, so that sums by chunk do not depend on
// threads. At least 32 rows each, so that summing the chunks costs little; at most 256 chunks.
struct RowChunks {
  int64_t rows, size, count;

  explicit RowChunks(int64_t rows)
      : rows(rows),
        size(std::max<int64_t>(32, (rows + 255) / 256)),
        count((rows + size - 1) / size) {}

  // fn(chunk, first row, row after the last) for all chunks, in parallel. A thread gets neighbours,
  // and the same in every call: what it wrote is in its own cache.
  template <class F>
  void for_each(const F& fn) const {
    parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) fn(i, i * size, std::min(rows, (i + 1) * size));
    });
  }
};

// A parameter vector [n] as fp32, padded with zeros; all zeros where there is none.
inline std::vector<float> padded_vector(const std::optional<Tensor>& t, int64_t n) {
  std::vector<float> out(padded_columns(n), 0.0f);
  if (!t || n == 0) return out;
  const bool is_wide = t->scalar_type() == ScalarType::Float;
  const Tensor wide = is_wide ? *t : torch::stable::to(*t, ScalarType::Float);
  std::memcpy(out.data(), wide.const_data_ptr(), n * sizeof(float));
  return out;
}

// out[j] = sum over chunks of partials[chunk * stride + j], j < n, in chunk order, as an fp32
// tensor [n] on the device of `like`.
inline Tensor sum_chunks(const float* partials, int64_t chunks, int64_t stride, int64_t n,
                         const Tensor& like) {
  Tensor sums = allocate(like, {n}, ScalarType::Float);
  auto* out = sums.mutable_data_ptr<float>();
  parallel_for(0, n, 1024, [&](int64_t begin, int64_t end) {
    std::fill(out + begin, out + end, 0.0f);
    for (int64_t c = 0; c < chunks; ++c)
      for (int64_t j = begin; j < end; ++j) out[j] += partials[c * stride + j];
  });
  return sums;
}

// The same for all numbers of a parameter, in its dtype.
inline Tensor sum_chunks(const float* partials, int64_t chunks, int64_t stride,
                         const Tensor& param) {
  const Tensor sums = sum_chunks(partials, chunks, stride, param.numel(), param);
  const ScalarType dtype = param.scalar_type();
  return dtype == ScalarType::Float ? sums : torch::stable::to(sums, dtype);
}

// The gradient of a bias: fn(first row, row after the last, sums) for all chunks in parallel adds
// up its rows in sums [stride], null without a bias, for which the result is empty.
template <class F>
Tensor bias_gradient(const RowChunks& chunks, const std::optional<Tensor>& bias, int64_t stride,
                     const Tensor& like, const F& fn) {
  Tensor partials = allocate(like, {bias ? chunks.count * stride : 0}, ScalarType::Float);
  float* sums = bias ? partials.mutable_data_ptr<float>() : nullptr;
  chunks.for_each([&](int64_t chunk, int64_t begin, int64_t end) {
    fn(begin, end, sums ? sums + chunk * stride : nullptr);
  });
  return bias ? sum_chunks(sums, chunks.count, stride, *bias) : allocate(like, {0});
}

}  // namespace bert_unpad
