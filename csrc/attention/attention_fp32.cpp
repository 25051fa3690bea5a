// CPU attention of one task, forward and backward, in fp32 arithmetic.
//
// A block of query rows keeps its strip of scores in the second-level cache, and the dropout mask
// is drawn inside the row pass over that strip. K and V are converted and packed once per task, for
// all blocks of queries. A strip has the columns from the first to the last that one of its queries
// sees.
//
// Where a task sees more keys than stay in cache, the forward pass takes them in parts and rescales
// the softmax (Milakov and Gimelshein, arXiv 1805.02867); the backward pass has a task for each
// part.
#include "attention/attention.h"
#include "attention/bias_simd.h"
#include "attention/task_simd.h"
#include "cpu/gemm_simd.h"
#include "cpu/philox_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

constexpr AttentionSplit kQueries = {768, 512}, kKeys = {768, 512};
constexpr int kColumns = 32;  // the first column of a strip is a multiple of it

// Rows of a block: strips of scores of at most 48 K floats (192 KB; two of them in the backward
// pass), a multiple of 16 because the dropout words of rows r and r + 8 come together. In a narrow
// window fewer: the strip has columns that only some of its rows see.
int block_rows(const AttentionCpuParams& p, int keys) {
  const int rows = 49152 / (keys + 1) / 16 * 16, most = narrow(p, keys) ? 48 : 96;
  return rows < 16 ? 16 : rows > most ? most : rows;
}

struct Sizes {
  int keys, rows;  // of a part, of a block
  int d4, dp, kp;  // head_dim rounded up to 4 and to kLanes, columns of a strip
  Sizes(const AttentionCpuParams& p, int all_keys, int part)
      : keys(all_keys < part ? all_keys : part),
        rows(block_rows(p, part)),
        d4(round_up(p.head_dim, 4)),
        dp(round_up(p.head_dim, kLanes)),
        kp(round_up(keys, kAttentionDropoutColumns)) {}
};

template <class T>
struct Forward {
  Range keys;  // that the task sees
  Sizes n;
  bool several;  // parts of keys
  float *wide, *kt, *v, *q, *s, *o, *factors, *maxima, *sums;
  uint16_t* words;
  BiasRows<T> bias;

  Forward(Scratch& scratch, const AttentionCpuParams& p, const AttentionTask& t)
      : keys(aligned(seen(p, t, {t.first, t.last}), kColumns)),
        n(p, keys.size(), part_size(keys.size(), kKeys)),
        several(keys.size() > n.keys),
        bias(scratch, p, t, n.rows, n.keys, false) {
    const int64_t rows = n.rows, kept = several ? t.last - t.first : n.rows;
    wide = scratch.take<float>(static_cast<int64_t>(n.keys) * n.d4);
    kt = scratch.take<float>(packed_size(n.d4, n.keys));
    v = scratch.take<float>(packed_size(n.keys, p.head_dim));
    q = scratch.take<float>(rows * n.d4);
    s = scratch.take<float>(rows * n.kp);
    o = scratch.take<float>(kept * n.dp);
    factors = scratch.take<float>(rows);
    maxima = scratch.take<float>(kept);
    sums = scratch.take<float>(kept);
    words = scratch.take<uint16_t>(2 * kAttentionDropoutRows * n.kp);
  }
};

template <class T>
struct Backward {
  Sizes n;
  float *wide, *kt, *vt, *k, *dk, *dv, *q, *dout, *q_packed, *dout_packed, *s, *ds, *dq;
  uint16_t* words;
  BiasRows<T> bias;

  Backward(Scratch& scratch, const AttentionCpuParams& p, const AttentionTask& t)
      : n(p, t.last - t.first, t.key_part), bias(scratch, p, t, n.rows, n.keys, true) {
    const int64_t keys = n.keys, rows = n.rows;
    wide = scratch.take<float>(keys * n.d4);
    kt = scratch.take<float>(packed_size(n.d4, n.keys));
    vt = scratch.take<float>(packed_size(n.d4, n.keys));
    k = scratch.take<float>(packed_size(n.keys, p.head_dim));
    dk = scratch.take<float>(keys * n.dp);
    dv = scratch.take<float>(keys * n.dp);
    q = scratch.take<float>(rows * n.d4);
    dout = scratch.take<float>(rows * n.d4);
    q_packed = scratch.take<float>(packed_size(n.rows, p.head_dim));
    dout_packed = scratch.take<float>(packed_size(n.rows, p.head_dim));
    s = scratch.take<float>(rows * n.kp);
    ds = scratch.take<float>(rows * n.kp);
    dq = scratch.take<float>(rows * n.dp);
    words = scratch.take<uint16_t>(2 * kAttentionDropoutRows * n.kp);
  }
};

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

// Sets the columns outside of `seen` to zero, up to `width`.
BU_INLINE void clear_unseen(float* s, Range seen, int width) {
  for (int j = 0; j < seen.first; ++j) s[j] = 0.0f;
  for (int j = seen.last; j < width; ++j) s[j] = 0.0f;
}

// Softmax weights of one row in base 2, not normalised, and 0 in the columns that it does not see.
// `maximum` and `sum` go on from those of the parts of the keys before. Returns the factor of what
// was summed up with the weights of these.
BU_INLINE float exponentials(float* s, Range seen, int padded, float& maximum, float& sum) {
  if (seen.size() == 0) {
    clear_unseen(s, seen, padded);
    return 1.0f;
  }
  const int first = seen.first / kLanes * kLanes, last = round_up(seen.last, kLanes);
  for (int j = first; j < seen.first; ++j) s[j] = -kInfinity;
  for (int j = seen.last; j < last; ++j) s[j] = -kInfinity;
  f32v top = splat(-kInfinity);
  for (int j = first; j < last; j += kLanes) top = vmax(load(s + j), top);
  const float before = maximum, here = reduce_max(top);
  maximum = before > here ? before : here;
  const float base = maximum == -kInfinity ? 0.0f : maximum;  // a bias may be -inf
  f32v total = {};
  for (int j = first; j < last; j += kLanes) {
    const f32v p = exp2v(load(s + j) - base);
    total += p;
    store(s + j, p);
  }
  clear_unseen(s, {first, last}, padded);
  const float factor = before == -kInfinity ? 0.0f : exp2v(splat(before - maximum))[0];
  sum = sum * factor + reduce_add(total);
  return factor;
}

// Calls row(r, words) for every row of a block, with the dropout words of the columns where there
// is dropout.
template <class Row>
inline void for_rows(const AttentionCpuParams& p, const AttentionTask& t, int head, Range rows,
                     Range columns, uint16_t* words, int kp, const Row& row) {
  if (p.keep_threshold == 65536u) {
    for (int r = 0; r < rows.size(); ++r) row(r, nullptr);
    return;
  }
  constexpr int kRows = kAttentionDropoutRows;
  const uint32_t stream = t.sequence * p.heads + head, flip = keep_rule(p.keep_threshold).flip;
  for (int base = 0; base < rows.size(); base += 16) {
    for (int g = 0; g < 8 && base + g < rows.size(); g += kRows) {
      for (int c = 0; c < columns.size(); c += kAttentionDropoutColumns)
        draw_attention(p.rng, flip, stream, rows.first + base + g, columns.first + c,
                       [=](int i, int j, const Words32& drawn) __attribute__((always_inline)) {
                         store_bits(words + (i / 8 * kRows + i % 8) * kp + c + j, drawn);
                       });
      for (int i = 0; i < 2 * kRows; ++i) {
        const int r = base + g + i / 2 + i % 2 * 8;
        if (r < rows.size()) row(r, words + (i % 2 * kRows + i / 2) * kp);
      }
    }
  }
}

// A block of rows with one part of the keys, of which it sees `columns`.
template <class T>
void forward_block(const AttentionCpuParams& p, const AttentionTask& t, const Forward<T>& m,
                   Range rows, Range keys, Range columns, bool begins, bool ends) {
  const Sizes& n = m.n;
  const int d = p.head_dim, width = columns.size(), lanes = round_up(width, kLanes);
  const int column = columns.first - keys.first;  // in the part
  const int64_t token = t.q_begin + rows.first, kept = m.several ? rows.first - t.first : 0;
  float *o = m.o + kept * n.dp, *maxima = m.maxima + kept, *sums = m.sums + kept;
  widen_rows(at<T>(p.q, token, t.head), p.q.token_stride, rows.size(), d, n.d4, p.scale * kLog2e,
             m.q);
  gemm({m.q, n.d4, 1}, rows.size(), width, n.d4, {m.kt, panel_size(n.d4), column}, m.s, n.kp,
       false);
  for_rows(p, t, t.head, rows, columns, m.words, n.kp, [&](int r, const uint16_t* words) {
    float* s = m.s + static_cast<int64_t>(r) * n.kp;
    const Range here = seen_among(p, t, rows.first + r, columns);
    if (begins) {
      maxima[r] = -kInfinity;
      sums[r] = 0.0f;
    }
    if (m.bias) m.bias.add(t.head, rows.first + r, columns, here, 1.0f, s);
    const float factor = exponentials(s, here, lanes, maxima[r], sums[r]);
    if (!begins && factor != 1.0f)
      for (float *x = o + r * n.dp, *end = x + n.dp; x < end; x += kLanes)
        store(x, load(x) * factor);
    if (words)
      for (int j = 0; j < lanes; j += kLanes)
        store(s + j, keep(load(s + j), words + j, p.keep_threshold));
  });
  gemm({m.s, n.kp, 1}, rows.size(), d, width,
       {m.v + static_cast<int64_t>(column) * kPanel, panel_size(keys.size())}, o, n.dp, !begins);
  if (!ends) return;
  float* lse = p.lse + t.head * p.q_tokens + token;
  const float scale = keep_scale(p.keep_threshold);
  for (int r = 0; r < rows.size(); ++r) {
    m.factors[r] = sums[r] == 0.0f ? 0.0f : scale / sums[r];  // 0: the query sees no keys
    lse[r] = maxima[r] * kLn2 + __builtin_logf(sums[r]);
  }
  narrow_rows(o, n.dp, rows.size(), d, m.factors, 0.0f, at<T>(p.out_w, token, t.head),
              p.out_w.token_stride);
}

template <class T>
void forward_task(const AttentionCpuParams& p, const AttentionTask& t, float* memory) {
  Scratch scratch{reinterpret_cast<char*>(memory)};
  const Forward<T> m(scratch, p, t);
  const Sizes& n = m.n;
  const int d = p.head_dim, kv_head = key_head(p, t.head);
  Range keys = {m.keys.first, m.keys.first};
  do {
    keys = both({keys.last, keys.last + n.keys}, m.keys);
    widen_rows(at<T>(p.k, t.k_begin + keys.first, kv_head), p.k.token_stride, keys.size(), d, n.d4,
               1.0f, m.wide);
    pack_transposed(m.wide, n.d4, keys.size(), n.d4, m.kt);
    pack(at<T>(p.v, t.k_begin + keys.first, kv_head), p.v.token_stride, keys.size(), d, 1.0f, m.v);
    for (int first = t.first; first < t.last; first += n.rows) {
      const Range rows = both({first, first + n.rows}, {t.first, t.last});
      const Range sees = seen(p, t, rows), columns = both(sees, keys);
      if (sees.size() == 0 && keys.first == m.keys.first)
        forward_block<T>(p, t, m, rows, keys, columns, true, true);
      else if (columns.size() > 0)
        forward_block<T>(p, t, m, rows, keys, aligned(columns, kColumns), sees.first >= keys.first,
                         sees.last <= keys.last);
    }
  } while (keys.last < m.keys.last);
}

// Per row: s holds scores, dp the gradient of the dropped weights. Leaves the dropped weights in s
// and the gradient of the scores in dp, both 0 in the columns that the row does not see.
BU_INLINE void softmax_backward_row(float* s, float* dp, Range seen, int width, float lse2,
                                    float delta, const uint16_t* words, uint32_t threshold,
                                    float scale) {
  const int first = seen.first / kLanes * kLanes, last = round_up(seen.last, kLanes);
  for (int j = first; j < last; j += kLanes) {
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
  clear_unseen(s, seen, width);
  clear_unseen(dp, seen, width);
}

// A block of rows of one head with the task's keys, of which it sees `columns`.
template <class T>
void backward_block(const AttentionCpuParams& p, const AttentionTask& t, const Backward<T>& m,
                    int head, Range rows, Range columns, const Turn& turn) {
  const Sizes& n = m.n;
  const int d = p.head_dim, count = rows.size(), width = columns.size();
  const int column = columns.first - t.first;
  const int64_t token = t.q_begin + rows.first;
  const T *q = at<T>(p.q, token, head), *dout = at<T>(p.dout, token, head);
  const T* out = at<T>(p.out, token, head);
  widen_rows(q, p.q.token_stride, count, d, n.d4, p.scale * kLog2e, m.q);
  pack(q, p.q.token_stride, count, d, p.scale, m.q_packed);
  widen_rows(dout, p.dout.token_stride, count, d, n.d4, 1.0f, m.dout);
  pack(dout, p.dout.token_stride, count, d, 1.0f, m.dout_packed);
  gemm({m.q, n.d4, 1}, count, width, n.d4, {m.kt, panel_size(n.d4), column}, m.s, n.kp, false);
  gemm({m.dout, n.d4, 1}, count, width, n.d4, {m.vt, panel_size(n.d4), column}, m.ds, n.kp, false);
  const float* lse = p.lse + head * p.q_tokens + token;
  const float scale = keep_scale(p.keep_threshold);
  for_rows(p, t, head, rows, columns, m.words, n.kp, [&](int r, const uint16_t* words) {
    f32v dot = {};
    const T* out_row = out + r * p.out.token_stride;
    const float* dout_row = m.dout + static_cast<int64_t>(r) * n.d4;
    int j = 0;
    for (; j + kLanes <= d; j += kLanes) dot += load(out_row + j) * load(dout_row + j);
    if (j < d) dot += load_n(out_row + j, d - j) * load_n(dout_row + j, d - j);
    float *s = m.s + static_cast<int64_t>(r) * n.kp, *ds = m.ds + static_cast<int64_t>(r) * n.kp;
    const Range here = seen_among(p, t, rows.first + r, columns);
    if (m.bias) m.bias.add(head, rows.first + r, columns, here, 1.0f, s);
    softmax_backward_row(s, ds, here, width, lse[r] * kLog2e, reduce_add(dot), words,
                         p.keep_threshold, scale);
    if (m.bias) m.bias.add_gradients(r, rows.first + r, columns, here, ds);
  });
  const int64_t first_key = static_cast<int64_t>(column) * n.dp;
  gemm({m.s, 1, n.kp}, width, d, count, {m.dout_packed, panel_size(count)}, m.dv + first_key, n.dp,
       true);
  gemm({m.ds, 1, n.kp}, width, d, count, {m.q_packed, panel_size(count)}, m.dk + first_key, n.dp,
       true);
  float* dq = turn.several ? dq_sums(p, head, token) : m.dq;
  turn.wait(p);
  gemm({m.ds, n.kp, 1}, count, d, width,
       {m.k + static_cast<int64_t>(column) * kPanel, panel_size(n.keys)}, dq, n.dp,
       turn.mine > turn.first);
  if (m.bias) m.bias.add_query_sums(head, rows, turn);
  turn.end();
  if (turn.mine == turn.last)
    narrow_rows(dq, n.dp, count, d, nullptr, p.scale, at<T>(p.dq, token, head), p.dq.token_stride);
}

template <class T>
void backward_task(const AttentionCpuParams& p, const AttentionTask& t, float* memory) {
  Scratch scratch{reinterpret_cast<char*>(memory)};
  const Backward<T> m(scratch, p, t);
  const Sizes& n = m.n;
  const int d = p.head_dim;
  const int64_t key = t.k_begin + t.first;
  const T* k = at<T>(p.k, key, t.head);
  widen_rows(k, p.k.token_stride, n.keys, d, n.d4, 1.0f, m.wide);
  pack_transposed(m.wide, n.d4, n.keys, n.d4, m.kt);
  pack(k, p.k.token_stride, n.keys, d, 1.0f, m.k);
  widen_rows(at<T>(p.v, key, t.head), p.v.token_stride, n.keys, d, n.d4, 1.0f, m.wide);
  pack_transposed(m.wide, n.d4, n.keys, n.d4, m.vt);
  for (int64_t i = 0; i < static_cast<int64_t>(n.keys) * n.dp; ++i) m.dk[i] = m.dv[i] = 0.0f;

  const int group = p.heads / p.kv_heads;
  for (int head = t.head * group; head < (t.head + 1) * group; ++head) {
    if (m.bias) m.bias.begin_head();
    for (int first = 0; first < t.q_len; first += n.rows) {
      const Range rows = both({first, first + n.rows}, {0, t.q_len}), sees = seen(p, t, rows);
      const Turn turn(p, t, head, first, sees);
      if (turn.taken())
        backward_block<T>(p, t, m, head, rows, aligned(both(sees, {t.first, t.last}), kColumns),
                          turn);
    }
    if (m.bias) m.bias.end_head(head);
  }
  narrow_rows(m.dk, n.dp, n.keys, d, nullptr, 1.0f, at<T>(p.dk, key, t.head), p.dk.token_stride);
  narrow_rows(m.dv, n.dp, n.keys, d, nullptr, 1.0f, at<T>(p.dv, key, t.head), p.dv.token_stride);
}

int64_t scratch_floats(const AttentionCpuParams& p, const AttentionTask& t, bool backward) {
  Scratch scratch{nullptr};  // of any dtype: all arithmetic is in fp32
  if (backward)
    Backward<float>(scratch, p, t);
  else
    Forward<float>(scratch, p, t);
  return scratch.bytes / 4;
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
    kQueries,
    kKeys,
    scratch_floats,
    by_dtype<forward_task<float>, forward_task<bf16>, forward_task<f16>>,
    by_dtype<backward_task<float>, backward_task<bf16>, backward_task<f16>>,
};

}  // namespace bert_unpad::BERT_UNPAD_ISA
