// Softmax cross-entropy of one row of logits.
//
// The forward pass is online (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018) by blocks that stay in the first-level cache: the running sum is rescaled once a block, not
// once an element, and the row is read from memory once.
#include "loss/loss.h"

#include "cpu/columns_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;
constexpr int64_t kBlock = 1024;

BU_INLINE f32v beyond(f32v v, Full) { return v; }
// Lanes beyond the width become -inf: they count in no maximum and no sum.
BU_INLINE f32v beyond(f32v v, Tail tail) {
  return select((i32v)lane_index() < tail.n, v, splat(-__builtin_inff()));
}

template <class T>
BU_INLINE float element(const T* row, int64_t j) {
  return load_n(row + j, 1)[0];
}

template <class T>
float forward_row(const LossCpuParams& p, int64_t row, bool& correct) {
  const T* x = static_cast<const T*>(p.logits) + row * p.columns;
  const int64_t label = p.labels[row];
  const float infinity = __builtin_inff();
  float maximum = -infinity;  // so far
  f32v sum = {};              // of exp(x - base)
  float base = 0.0f;          // the maximum where it is finite
  int64_t top_block = 0;      // where the maximum was first reached
  for (int64_t block = 0; block < p.vocab; block += kBlock) {
    const T* b = x + block;
    const int64_t n = p.vocab - block < kBlock ? p.vocab - block : kBlock;
    f32v top = splat(-infinity);
    for_columns(n,
                [&](int64_t j, auto width) { top = vmax(top, beyond(load(b + j, width), width)); });
    const float block_maximum = reduce_max(top);
    if (block_maximum > maximum) {
      if (maximum > -infinity) sum *= expv(splat(maximum - block_maximum));
      maximum = base = block_maximum;
      top_block = block;
    }
    for_columns(n, [&](int64_t j, auto width) {
      sum += exp2v((beyond(load(b + j, width), width) - base) * kLog2e);
    });
  }
  const float log_sum = __builtin_logf(reduce_add(sum)), logit = element(x, label);
  p.lse[row] = base + log_sum;
  correct = logit == maximum && label >= top_block && label < top_block + kBlock;
  for (int64_t j = top_block; correct && j < label; ++j) correct = element(x, j) != maximum;
  return log_sum + (base - logit);
}

template <class T>
void backward_row(const LossCpuParams& p, int64_t row) {
  const T* x = static_cast<const T*>(p.logits) + row * p.columns;
  T* dx = static_cast<T*>(p.dlogits) + row * p.columns;
  const int64_t label = p.labels[row];
  const bool ignored = label == p.ignore_index;
  const float lse = p.lse[row];
  const float logit = ignored ? 0.0f : element(x, label);
  if (!ignored)
    for_columns(p.vocab, [&](int64_t j, auto width) {
      store(dx + j, exp2v((load(x + j, width) - lse) * kLog2e) * p.dloss, width);
    });
  const int64_t zero_from = ignored ? 0 : p.vocab;
  std::memset(dx + zero_from, 0, (p.columns - zero_from) * sizeof(T));
  if (!ignored) {
    const f32v g = (exp2v(splat((logit - lse) * kLog2e)) - 1.0f) * p.dloss;
    store_n(dx + label, g, 1);
  }
}

float forward(const LossCpuParams& p, int64_t row, bool& correct) {
  switch (p.dtype) {
    case DType::kFloat32:
      return forward_row<float>(p, row, correct);
    case DType::kBFloat16:
      return forward_row<bf16>(p, row, correct);
    default:
      return forward_row<f16>(p, row, correct);
  }
}

void backward(const LossCpuParams& p, int64_t row) {
  switch (p.dtype) {
    case DType::kFloat32:
      return backward_row<float>(p, row);
    case DType::kBFloat16:
      return backward_row<bf16>(p, row);
    case DType::kFloat16:
      return backward_row<f16>(p, row);
  }
}

}  // namespace

extern const LossKernels loss_kernels = {forward, backward};

}  // namespace bert_unpad::BERT_UNPAD_ISA
