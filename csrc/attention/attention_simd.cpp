// CPU attention of one (sequence, head), forward and backward, in fp32 arithmetic.
//
// A block of query rows keeps its whole strip of scores in the second-level cache, so the softmax
// needs no online rescaling, and the dropout mask is drawn inside the row pass over that strip.
// K and V are converted and packed once per task, for all blocks of queries.
#include "attention/attention.h"
#include "attention/task_simd.h"
#include "cpu/gemm_simd.h"
#include "cpu/philox_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

// Rows of a block: strips of scores of at most 48 K floats (192 KB; two of them in the backward
// pass), a multiple of 16 because the dropout words of rows r and r + 8 come together.
int block_rows(int k_len) {
  const int rows = 49152 / (k_len + 1) / 16 * 16;
  return rows < 16 ? 16 : rows > 96 ? 96 : rows;
}

// Where everything lies in a task's scratch memory.
struct Layout {
  int d4, dp, kp, rows;  // head_dim rounded up to 4 and to kLanes, k_len rounded up, block rows
  int64_t size = 0;
  int64_t take(int64_t n) {
    const int64_t at = size;
    size += (n + 15) / 16 * 16;
    return at;
  }
};

Layout make_layout(int k_len, int head_dim) {
  return {round_up(head_dim, 4), round_up(head_dim, kLanes),
          round_up(k_len, kAttentionDropoutColumns), block_rows(k_len)};
}

// Copies rows to fp32 with stride `width` (columns beyond `columns` are zero), times `factor`.
template <class T>
inline void widen_rows(const T* x, int64_t stride, int rows, int columns, int width, float factor,
                       float* out) {
  for (int i = 0; i < rows; ++i, x += stride, out += width) {
    int j = 0;
    for (; j + kLanes <= columns; j += kLanes) store(out + j, load(x + j) * factor);
    if (j < columns) store_n(out + j, load_n(x + j, columns - j) * factor, columns - j);
    for (int c = columns; c < width; ++c) out[c] = 0.0f;
  }
}

// out = x * factor per row, from fp32 rows of stride `width`.
template <class T>
inline void narrow_rows(const float* x, int width, int rows, int columns, const float* factors,
                        float factor, T* out, int64_t stride) {
  for (int i = 0; i < rows; ++i, x += width, out += stride) {
    const float f = factors ? factors[i] : factor;
    int j = 0;
    for (; j + kLanes <= columns; j += kLanes) store(out + j, load(x + j) * f);
    if (j < columns) store_n(out + j, load(x + j) * f, columns - j);
  }
}

// Softmax weights of one row in base 2, not normalised; the sum and the maximum go out.
inline void exponentials(float* s, int columns, int padded, float& maximum, float& sum) {
  for (int j = columns; j < padded; ++j) s[j] = -__builtin_inff();
  f32v top = splat(-__builtin_inff());
  for (int j = 0; j < padded; j += kLanes) top = vmax(load(s + j), top);
  maximum = reduce_max(top);
  f32v total = {};
  for (int j = 0; j < padded; j += kLanes) {
    const f32v p = exp2v(load(s + j) - maximum);
    total += p;
    store(s + j, p);
  }
  sum = reduce_add(total);
}

// Calls row(r, words) for every row of a block, with its dropout words where there is dropout.
template <class Row>
inline void for_rows(const AttentionCpuParams& p, const AttentionTask& t, int first, int rows,
                     uint16_t* words, int kp, const Row& row) {
  if (p.keep_threshold == 65536u) {
    for (int r = 0; r < rows; ++r) row(r, nullptr);
    return;
  }
  const uint32_t stream = t.sequence * p.heads + t.head;
  for (int base = 0; base < rows; base += 16) {
    for (int g = 0; g < 8 && base + g < rows; ++g) {
      for (int c = 0; c < kp; c += kAttentionDropoutColumns)
        attention_dropout_words(p.rng, stream, first + base + g, c, words + c, words + kp + c);
      row(base + g, words);
      if (base + g + 8 < rows) row(base + g + 8, words + kp);
    }
  }
}

template <class T>
void forward_task(const AttentionCpuParams& p, const AttentionTask& t, float* scratch) {
  Layout l = make_layout(t.k_len, p.head_dim);
  const int d = p.head_dim, lanes = round_up(t.k_len, kLanes);
  float* rows_f = scratch + l.take(static_cast<int64_t>(t.k_len) * l.d4);
  float* kt = scratch + l.take(packed_size(l.d4, t.k_len));
  float* v = scratch + l.take(packed_size(t.k_len, d));
  float* q = scratch + l.take(static_cast<int64_t>(l.rows) * l.d4);
  float* s = scratch + l.take(static_cast<int64_t>(l.rows) * l.kp);
  float* o = scratch + l.take(static_cast<int64_t>(l.rows) * l.dp);
  float* factors = scratch + l.take(l.rows);
  auto* words = reinterpret_cast<uint16_t*>(scratch + l.take(l.kp));

  widen_rows(at<T>(p.k, t.k_begin, t.head), p.k.token_stride, t.k_len, d, l.d4, 1.0f, rows_f);
  pack_transposed(rows_f, l.d4, t.k_len, l.d4, kt);
  pack(at<T>(p.v, t.k_begin, t.head), p.v.token_stride, t.k_len, d, 1.0f, v);

  const float scale = keep_scale(p.keep_threshold);
  for (int first = 0; first < t.q_len; first += l.rows) {
    const int rows = t.q_len - first < l.rows ? t.q_len - first : l.rows;
    widen_rows(at<T>(p.q, t.q_begin + first, t.head), p.q.token_stride, rows, d, l.d4,
               p.scale * kLog2e, q);
    gemm({q, l.d4, 1}, rows, t.k_len, l.d4, kt, s, l.kp, false);
    float* lse = p.lse + t.head * p.q_tokens + t.q_begin + first;
    for_rows(p, t, first, rows, words, l.kp, [&](int r, const uint16_t* w) {
      float* row = s + static_cast<int64_t>(r) * l.kp;
      float maximum, sum;
      exponentials(row, t.k_len, lanes, maximum, sum);
      if (w)
        for (int j = 0; j < lanes; j += kLanes)
          store(row + j, keep(load(row + j), w + j, p.keep_threshold));
      factors[r] = sum == 0.0f ? 0.0f : scale / sum;  // 0: the sequence has no keys
      lse[r] = maximum * kLn2 + __builtin_logf(sum);
    });
    gemm({s, l.kp, 1}, rows, d, t.k_len, v, o, l.dp, false);
    narrow_rows(o, l.dp, rows, d, factors, 0.0f, at<T>(p.out_w, t.q_begin + first, t.head),
                p.out_w.token_stride);
  }
}

// Per row: s holds scores, dp the gradient of the dropped weights. Leaves the dropped weights in s
// and the gradient of the scores in dp.
inline void softmax_backward_row(float* s, float* dp, int lanes, float lse2, float delta,
                                 const uint16_t* words, uint32_t threshold, float scale) {
  for (int j = 0; j < lanes; j += kLanes) {
    const f32v weight = exp2v(load(s + j) - lse2);
    const f32v g = load(dp + j) * scale;
    if (words) {
      store(s + j, keep(weight * scale, words + j, threshold));
      store(dp + j, weight * (keep(g, words + j, threshold) - delta));
    } else {
      store(s + j, weight);
      store(dp + j, weight * (g - delta));
    }
  }
}

template <class T>
void backward_task(const AttentionCpuParams& p, const AttentionTask& t, float* scratch) {
  Layout l = make_layout(t.k_len, p.head_dim);
  const int d = p.head_dim, lanes = round_up(t.k_len, kLanes);
  float* rows_f = scratch + l.take(static_cast<int64_t>(t.k_len) * l.d4);
  float* kt = scratch + l.take(packed_size(l.d4, t.k_len));
  float* vt = scratch + l.take(packed_size(l.d4, t.k_len));
  float* k = scratch + l.take(packed_size(t.k_len, d));
  float* dk = scratch + l.take(static_cast<int64_t>(t.k_len) * l.dp);
  float* dv = scratch + l.take(static_cast<int64_t>(t.k_len) * l.dp);
  float* q = scratch + l.take(static_cast<int64_t>(l.rows) * l.d4);
  float* dout = scratch + l.take(static_cast<int64_t>(l.rows) * l.d4);
  float* q_packed = scratch + l.take(packed_size(l.rows, d));
  float* dout_packed = scratch + l.take(packed_size(l.rows, d));
  float* s = scratch + l.take(static_cast<int64_t>(l.rows) * l.kp);
  float* ds = scratch + l.take(static_cast<int64_t>(l.rows) * l.kp);
  float* dq = scratch + l.take(static_cast<int64_t>(l.rows) * l.dp);
  auto* words = reinterpret_cast<uint16_t*>(scratch + l.take(l.kp));

  const T* k_in = at<T>(p.k, t.k_begin, t.head);
  widen_rows(k_in, p.k.token_stride, t.k_len, d, l.d4, 1.0f, rows_f);
  pack_transposed(rows_f, l.d4, t.k_len, l.d4, kt);
  pack(k_in, p.k.token_stride, t.k_len, d, 1.0f, k);
  widen_rows(at<T>(p.v, t.k_begin, t.head), p.v.token_stride, t.k_len, d, l.d4, 1.0f, rows_f);
  pack_transposed(rows_f, l.d4, t.k_len, l.d4, vt);

  const float scale = keep_scale(p.keep_threshold);
  for (int first = 0; first < t.q_len; first += l.rows) {
    const int rows = t.q_len - first < l.rows ? t.q_len - first : l.rows;
    const T* q_in = at<T>(p.q, t.q_begin + first, t.head);
    const T* dout_in = at<T>(p.dout, t.q_begin + first, t.head);
    const T* out_in = at<T>(p.out, t.q_begin + first, t.head);
    widen_rows(q_in, p.q.token_stride, rows, d, l.d4, p.scale * kLog2e, q);
    pack(q_in, p.q.token_stride, rows, d, p.scale, q_packed);
    widen_rows(dout_in, p.dout.token_stride, rows, d, l.d4, 1.0f, dout);
    pack(dout_in, p.dout.token_stride, rows, d, 1.0f, dout_packed);
    gemm({q, l.d4, 1}, rows, t.k_len, l.d4, kt, s, l.kp, false);
    gemm({dout, l.d4, 1}, rows, t.k_len, l.d4, vt, ds, l.kp, false);
    const float* lse = p.lse + t.head * p.q_tokens + t.q_begin + first;
    for_rows(p, t, first, rows, words, l.kp, [&](int r, const uint16_t* w) {
      f32v dot = {};
      const T* out_row = out_in + r * p.out.token_stride;
      const float* dout_row = dout + static_cast<int64_t>(r) * l.d4;
      int j = 0;
      for (; j + kLanes <= d; j += kLanes) dot += load(out_row + j) * load(dout_row + j);
      if (j < d) dot += load_n(out_row + j, d - j) * load_n(dout_row + j, d - j);
      const int64_t at_row = static_cast<int64_t>(r) * l.kp;
      softmax_backward_row(s + at_row, ds + at_row, lanes, lse[r] * kLog2e, reduce_add(dot), w,
                           p.keep_threshold, scale);
    });
    gemm({s, 1, l.kp}, t.k_len, d, rows, dout_packed, dv, l.dp, first > 0);
    gemm({ds, 1, l.kp}, t.k_len, d, rows, q_packed, dk, l.dp, first > 0);
    gemm({ds, l.kp, 1}, rows, d, t.k_len, k, dq, l.dp, false);
    narrow_rows(dq, l.dp, rows, d, nullptr, p.scale, at<T>(p.dq, t.q_begin + first, t.head),
                p.dq.token_stride);
  }
  if (t.q_len == 0)
    for (int64_t i = 0; i < static_cast<int64_t>(t.k_len) * l.dp; ++i) dk[i] = dv[i] = 0.0f;
  narrow_rows(dk, l.dp, t.k_len, d, nullptr, 1.0f, at<T>(p.dk, t.k_begin, t.head),
              p.dk.token_stride);
  narrow_rows(dv, l.dp, t.k_len, d, nullptr, 1.0f, at<T>(p.dv, t.k_begin, t.head),
              p.dv.token_stride);
}

int64_t scratch_floats(int q_len, int k_len, int head_dim, bool backward) {
  Layout l = make_layout(k_len, head_dim);
  const int64_t k_rows = static_cast<int64_t>(k_len) * l.dp;
  const int64_t k_packed = packed_size(l.d4, k_len), rows_packed = packed_size(l.rows, head_dim);
  // An upper bound of the takes above: 32 of them round up by at most 15 floats each.
  int64_t floats = 512 + 2 * k_rows + packed_size(k_len, head_dim) + 2 * k_packed + l.kp +
                   static_cast<int64_t>(l.rows) * (2 * l.kp + 3 * l.dp + 1) + 2 * rows_packed;
  if (backward) floats += 2 * k_rows;
  return floats;
}

template <void (*F32)(const AttentionCpuParams&, const AttentionTask&, float*),
          void (*BF16)(const AttentionCpuParams&, const AttentionTask&, float*),
          void (*F16)(const AttentionCpuParams&, const AttentionTask&, float*)>
void by_dtype(const AttentionCpuParams& p, const AttentionTask& t, float* scratch) {
  switch (p.dtype) {
    case DType::kFloat32:
      return F32(p, t, scratch);
    case DType::kBFloat16:
      return BF16(p, t, scratch);
    case DType::kFloat16:
      return F16(p, t, scratch);
  }
}

}  // namespace

extern const AttentionKernels attention_kernels = {
    scratch_floats,
    by_dtype<forward_task<float>, forward_task<bf16>, forward_task<f16>>,
    by_dtype<backward_task<float>, backward_task<bf16>, backward_task<f16>>,
};

}  // namespace bert_unpad::BERT_UNPAD_ISA
