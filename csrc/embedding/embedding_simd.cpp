// dropout(LN(word + position + token type)) of packed tokens, forward and backward, and the sums of
// gradient rows that a table's gradient is made of.
#include "embedding/embedding.h"

#include "cpu/columns_simd.h"
#include "cpu/norm_row_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

template <class P>
struct Rows {
  const P *word, *position, *token_type;

  Rows(const EmbeddingCpuParams& p, int64_t token)
      : word(row(p, 0, token)), position(row(p, 1, token)), token_type(row(p, 2, token)) {}

  static const P* row(const EmbeddingCpuParams& p, int table, int64_t token) {
    return static_cast<const P*>(p.tables[table]) + p.ids[table][token] * p.hidden;
  }
  template <class Width>
  BU_INLINE f32v sum(int64_t j, Width width) const {
    return load(word + j, width) + load(position + j, width) + load(token_type + j, width);
  }
};

// The token's dropout words, or null where there is no dropout.
BU_INLINE const uint16_t* token_words(const EmbeddingCpuParams& p, int64_t token, float* scratch) {
  if (p.keep_threshold == 65536u) return nullptr;
  auto* words = reinterpret_cast<uint16_t*>(scratch + 2 * p.padded);
  row_words(p.rng, p.keep_threshold, static_cast<uint32_t>(token), p.hidden, words);
  return words;
}

template <class T, class P>
void forward_rows(const EmbeddingCpuParams& p, int64_t begin, int64_t end, float* scratch) {
  float* z = scratch;
  const float scale = keep_scale(p.keep_threshold);
  for (int64_t token = begin; token < end; ++token) {
    const Rows<P> rows(p, token);
    f32v total = {};
    for_columns(p.hidden, [&](int64_t j, auto width) {
      const f32v v = rows.sum(j, width);
      store(z + j, v);
      total += v;
    });
    float mean, rstd;
    row_statistics(z, p.hidden, total, p.eps, mean, rstd);
    p.mean[token] = mean;
    p.rstd[token] = rstd;
    const uint16_t* words = token_words(p, token, scratch);
    T* y = static_cast<T*>(p.y) + token * p.hidden;
    for_columns(p.hidden, [&](int64_t j, auto width) {
      f32v v = (load(z + j) - mean) * rstd * load(p.weight + j) + load(p.bias + j);
      if (words) v = keep(v * scale, words + j, p.keep_threshold);
      store(y + j, v, width);
    });
  }
}

template <class T, class P>
void backward_rows(const EmbeddingCpuParams& p, int64_t begin, int64_t end, float* scratch,
                   float* sums) {
  float *xhat = scratch, *g = scratch + p.padded;
  float *dweight = sums, *dbias = sums + p.padded;
  const float keep_factor = keep_scale(p.keep_threshold);
  for (int64_t j = 0; j < 2 * p.padded; ++j) sums[j] = 0.0f;
  for (int64_t token = begin; token < end; ++token) {
    const Rows<P> rows(p, token);
    const uint16_t* words = token_words(p, token, scratch);
    const T* dy = static_cast<const T*>(p.dy) + token * p.hidden;
    const float mean = p.mean[token], rstd = p.rstd[token];
    f32v sum_g = {}, sum_gx = {};
    // Beyond the last column dy reads as zero, so nothing there counts.
    for_columns(p.hidden, [&](int64_t j, auto width) {
      const f32v x = (rows.sum(j, width) - mean) * rstd;
      f32v d = load(dy + j, width);
      if (words) d = keep(d * keep_factor, words + j, p.keep_threshold);
      const f32v weighted = d * load(p.weight + j);
      store(xhat + j, x);
      store(g + j, weighted);
      sum_g += weighted;
      sum_gx += weighted * x;
      store(dweight + j, load(dweight + j) + d * x);
      store(dbias + j, load(dbias + j) + d);
    });
    const float scale = rstd / static_cast<float>(p.hidden);
    const float a = reduce_add(sum_g) * scale, b = reduce_add(sum_gx) * scale;
    float* dz = p.dz + token * p.padded;
    for_columns(p.hidden, [&](int64_t j, auto) {
      store(dz + j, load(g + j) * rstd - (load(xhat + j) * b + a));
    });
  }
}

template <class T>
void sum_rows_as(const float* rows, int64_t stride, const int32_t* order, int64_t count,
                 int64_t columns, T* out) {
  constexpr int kVectors = 8;  // a strip of columns whose sums stay in registers
  int64_t j = 0;
  for (; j + kVectors * kLanes <= columns; j += kVectors * kLanes) {
    f32v sum[kVectors] = {};
    for (int64_t i = 0; i < count; ++i) {
      const float* row = rows + order[i] * stride + j;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[v] += load(row + v * kLanes);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(out + j + v * kLanes, sum[v]);
  }
  for_columns(columns - j, [&](int64_t k, auto width) {
    f32v sum = {};
    for (int64_t i = 0; i < count; ++i) sum += load(rows + order[i] * stride + j + k, width);
    store(out + j + k, sum, width);
  });
}

// Calls function<activation type, table type>.
#define BU_DISPATCH(function, ...)                                               \
  const bool wide = p.table_dtype == DType::kFloat32;                            \
  switch (p.dtype) {                                                             \
    case DType::kFloat32:                                                        \
      return function<float, float>(__VA_ARGS__);                                \
    case DType::kBFloat16:                                                       \
      return (wide ? function<bf16, float> : function<bf16, bf16>)(__VA_ARGS__); \
    case DType::kFloat16:                                                        \
      return (wide ? function<f16, float> : function<f16, f16>)(__VA_ARGS__);    \
  }

void forward(const EmbeddingCpuParams& p, int64_t begin, int64_t end, float* scratch) {
  BU_DISPATCH(forward_rows, p, begin, end, scratch)
}

void backward(const EmbeddingCpuParams& p, int64_t begin, int64_t end, float* scratch,
              float* sums) {
  BU_DISPATCH(backward_rows, p, begin, end, scratch, sums)
}

void sum_rows(const float* rows, int64_t stride, const int32_t* order, int64_t count,
              int64_t columns, DType dtype, void* out) {
  switch (dtype) {
    case DType::kFloat32:
      return sum_rows_as(rows, stride, order, count, columns, static_cast<float*>(out));
    case DType::kBFloat16:
      return sum_rows_as(rows, stride, order, count, columns, static_cast<bf16*>(out));
    case DType::kFloat16:
      return sum_rows_as(rows, stride, order, count, columns, static_cast<f16*>(out));
  }
}

}  // namespace

extern const EmbeddingKernels embedding_kernels = {forward, backward, sum_rows};

}  // namespace bert_unpad::BERT_UNPAD_ISA
