// CPU attention of one (sequence, head) in bf16, forward and backward, on CPUs that multiply bf16.
//
// Products take bf16 and add in fp32; softmax and dropout are in fp32, and probabilities and the
// gradients of scores are rounded to bf16 once, for the products that read them. Scores are never
// stored beyond a block of rows. What is read as pairs of rows (see cpu/gemm_bf16.h) is written
// that way: K and V once per task, weights and gradients of scores by the pass that computes them.
//
// In the backward pass dK and dV are summed up transposed, as dK^T = Q^T dS: so dS is a right-hand
// side, whose pairs of rows are r and r + 8 of 16, the rows whose dropout bits come together.
#include "attention/attention.h"
#include "attention/task_simd.h"
#include "cpu/columns_simd.h"
#include "cpu/gemm_bf16.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

constexpr int kForwardRows = 64;
// Scores of the backward pass are computed and used up in pieces of this size, in the first-level
// cache.
constexpr int kPieceRows = 32, kPieceColumns = 128;
constexpr int kPieceStride = kPieceColumns + 16;  // spreads rows over the sets of the cache

// Rows of a block in the backward pass: three bf16 matrices [rows, keys] stay in the second-level
// cache.
int backward_rows(int q_len, int k_len) {
  const int most = 65536 / (k_len + 1) / kPieceRows * kPieceRows;
  const int rows = most < kPieceRows ? kPieceRows : most > 128 ? 128 : most;
  const int needed = round_up(q_len, kPieceRows);
  return rows < needed ? rows : needed;
}

// Hands out a task's scratch memory; without memory, counts how much a task needs.
struct Scratch {
  char* base;
  int64_t bytes = 0;
  template <class T>
  T* take(int64_t n) {
    const int64_t at = bytes;
    bytes += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + at);
  }
};

// Sizes as the products need them.
struct Sizes {
  int keys, depth, columns;  // k_len to 32; head_dim to 32 and to 16
  int kept_stride;           // of draw_kept, which writes the bits of 64 columns at a time
  Sizes(int k_len, int head_dim)
      : keys(round_up(k_len, 32)),
        depth(round_up(head_dim, 32)),
        columns(round_up(head_dim, 16)),
        kept_stride(keys / 16 + 4) {}
};

struct Forward {
  Sizes n;
  bf16 *k, *v, *q, *weights;
  float *scores, *out;
  uint16_t* kept;
  int64_t score_stride, weight_stride;

  Forward(Scratch& scratch, int k_len, int head_dim) : n(k_len, head_dim) {
    score_stride = n.keys + 16;
    weight_stride = n.keys + 32;
    k = scratch.take<bf16>(static_cast<int64_t>(n.keys) * n.depth);
    v = scratch.take<bf16>(static_cast<int64_t>(n.keys) * n.columns);
    q = scratch.take<bf16>(kForwardRows * n.depth);
    weights = scratch.take<bf16>(kForwardRows * weight_stride);
    scores = scratch.take<float>(kForwardRows * score_stride);
    out = scratch.take<float>(kForwardRows * n.columns);
    kept = scratch.take<uint16_t>(kForwardRows * n.kept_stride);
  }
};

struct Backward {
  Sizes n;
  int rows;
  bf16 *k_transposed, *v_transposed, *k, *q, *dout, *q_transposed, *dout_transposed;
  bf16 *weight_pairs, *gradient_pairs, *gradients;  // dropped weights, gradients of scores
  float *scores, *dweights, *dq, *dk, *dv, *lse, *delta;
  uint16_t* kept;
  int64_t gradient_stride, sum_stride;

  Backward(Scratch& scratch, int q_len, int k_len, int head_dim)
      : n(k_len, head_dim), rows(backward_rows(q_len, k_len)) {
    gradient_stride = n.keys + 32;
    sum_stride = n.keys + 16;
    k_transposed = scratch.take<bf16>(static_cast<int64_t>(n.keys) * n.depth);
    v_transposed = scratch.take<bf16>(static_cast<int64_t>(n.keys) * n.depth);
    k = scratch.take<bf16>(static_cast<int64_t>(n.keys) * n.columns);
    q = scratch.take<bf16>(rows * n.depth);
    dout = scratch.take<bf16>(rows * n.depth);
    q_transposed = scratch.take<bf16>(rows * n.columns);
    dout_transposed = scratch.take<bf16>(rows * n.columns);
    weight_pairs = scratch.take<bf16>(static_cast<int64_t>(rows) * n.keys);
    gradient_pairs = scratch.take<bf16>(static_cast<int64_t>(rows) * n.keys);
    gradients = scratch.take<bf16>(rows * gradient_stride);
    scores = scratch.take<float>(kPieceRows * kPieceStride);
    dweights = scratch.take<float>(kPieceRows * kPieceStride);
    dq = scratch.take<float>(rows * n.columns);
    dk = scratch.take<float>(n.columns * sum_stride);
    dv = scratch.take<float>(n.columns * sum_stride);
    lse = scratch.take<float>(rows);
    delta = scratch.take<float>(rows);
    kept = scratch.take<uint16_t>(static_cast<int64_t>(rows) * n.kept_stride);
  }
};

// A bit for each weight that dropout keeps, for `rows` rows from `first` (a multiple of 16) on:
// 16 columns a number, [rows to 16][n.kept_stride].
void draw_kept(const AttentionCpuParams& p, const AttentionTask& t, int first, int rows,
               const Sizes& n, uint16_t* kept) {
  const uint32_t stream = t.sequence * p.heads + t.head;
  for (int base = 0; base < rows; base += 16)
    for (int g = 0; g < 8; ++g)
      for (int c = 0; c < n.keys; c += 64) {
        uint16_t* bits = kept + static_cast<int64_t>(base + g) * n.kept_stride + c / 16;
        attention_dropout_kept(p.rng, stream, first + base + g, c, p.keep_threshold, bits,
                               bits + 8 * n.kept_stride);
      }
}

// The largest score after scaling, before it: the greatest number, or the least where the scale is
// negative.
BU_INLINE float largest_score(const float* s, int k_len, bool negative) {
  f32v top = splat(negative ? kInfinity : -kInfinity);
  const auto take = [&](f32v x) __attribute__((always_inline)) {
    top = negative ? vmin(top, x) : vmax(top, x);
  };
  int j = 0;
  for (; j + kLanes <= k_len; j += kLanes) take(load(s + j));
  if (j < k_len) take(select((i32v)lane_index() < k_len - j, load(s + j), top));
  return negative ? -reduce_max(-top) : reduce_max(top);
}

// One row: scores -> weights that are not normalised, and their sum before dropout. The largest
// score is subtracted before scaling: a difference of equal numbers is 0 however large they are.
BU_INLINE void softmax_row(const float* s, int k_len, int keys, float scale, const uint16_t* kept,
                           bf16* weights, float& maximum, float& sum) {
  const float largest = largest_score(s, k_len, scale < 0.0f);
  maximum = largest * scale;
  f32v total = {};
  for (int j = 0; j < keys; j += 32) {
    const uint32_t inside = first_columns(k_len - j);
    const uint32_t stays = kept ? inside & load_bits<uint32_t>(kept + j / 16) : inside;
    f32v w[2 * kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kVectors; ++i) {
      const f32v e = exp2_short((load(s + j + kLanes * i) - largest) * scale);
      total += masked(e, inside >> (kLanes * i));
      w[i] = masked(e, stays >> (kLanes * i));
    }
    store_bits(weights + j, narrow_two(w, w + kVectors));
  }
  sum = reduce_add(total);
}

// out = x * factor, rounded.
BU_INLINE void round_row(const float* x, int columns, float factor, bf16* out) {
  for_columns(columns, [&](int64_t j, auto width) { store(out + j, load(x + j) * factor, width); });
}

void forward_task(const AttentionCpuParams& p, const AttentionTask& t, float* memory) {
  Scratch scratch{reinterpret_cast<char*>(memory)};
  const Forward m(scratch, t.k_len, p.head_dim);
  const Sizes& n = m.n;
  const TileRegisters tiles;
  pack_pairs_transposed(at<bf16>(p.k, t.k_begin, t.head), p.k.token_stride, t.k_len, p.head_dim,
                        n.keys, n.depth, m.k);
  pack_pairs(at<bf16>(p.v, t.k_begin, t.head), p.v.token_stride, t.k_len, p.head_dim, n.keys, m.v);

  const bool dropout = p.keep_threshold != 65536u;
  const float keep = keep_scale(p.keep_threshold);
  for (int first = 0; first < t.q_len; first += kForwardRows) {
    const int rows = t.q_len - first < kForwardRows ? t.q_len - first : kForwardRows;
    const int whole = round_up(rows, 16);
    copy_rows(at<bf16>(p.q, t.q_begin + first, t.head), p.q.token_stride, rows, p.head_dim, whole,
              n.depth, m.q);
    gemm_bf16({m.q, n.depth}, whole, {m.k, n.depth * kPairColumns}, n.keys, n.depth, m.scores,
              m.score_stride, false);
    if (dropout) draw_kept(p, t, first, rows, n, m.kept);
    float sums[kForwardRows];
    float* lse = p.lse + t.head * p.q_tokens + t.q_begin + first;
    for (int r = 0; r < rows; ++r) {
      float maximum;
      softmax_row(m.scores + r * m.score_stride, t.k_len, n.keys, p.scale * kLog2e,
                  dropout ? m.kept + r * n.kept_stride : nullptr, m.weights + r * m.weight_stride,
                  maximum, sums[r]);
      lse[r] = maximum * kLn2 + __builtin_logf(sums[r]);
    }
    for (int r = rows; r < whole; ++r)
      for (int j = 0; j < n.keys; j += 32) store_bits(m.weights + r * m.weight_stride + j, Words{});
    gemm_bf16({m.weights, m.weight_stride}, whole, {m.v, n.keys * kPairColumns}, n.columns, n.keys,
              m.out, n.columns, false);
    bf16* out = at<bf16>(p.out_w, t.q_begin + first, t.head);
    for (int r = 0; r < rows; ++r)  // a sum of 0: the sequence has no keys
      round_row(m.out + r * n.columns, p.head_dim, sums[r] == 0.0f ? 0.0f : keep / sums[r],
                out + r * p.out_w.token_stride);
  }
}

// The transpose of x [rows, width] as the left-hand side of a product whose right-hand side has the
// pairs of rows r and r + 8: [columns][rows]. Rows are a multiple of 32.
void transpose_rows(const bf16* x, int width, int rows, int columns, bf16* out) {
  for (int base = 0; base < rows; base += 32)
    for (int c = 0; c < columns; c += 16) {
      Words r[16];
      for (int i = 0; i < 16; ++i) {
        const bf16* row = x + (base + i / 8 * 16 + i % 8) * width + c;
        r[i] = load_pairs(row, 0xffffu, row + 8 * width, 0xffffu);
      }
      transpose16(r);
      for (int i = 0; i < 16; ++i) store_bits(out + (c + i) * rows + base, r[i]);
    }
}

// One piece of scores, [32, columns], and what comes out of it: the dropped weights and the scores'
// gradients. `row` is the piece's first row in the block, `column` its first column.
BU_INLINE void piece(const AttentionCpuParams& p, const Backward& m, int rows, int k_len, int row,
                     int column, int columns) {
  const float scale = p.scale * kLog2e, keep = keep_scale(p.keep_threshold);
  const bool dropout = p.keep_threshold != 65536u;
  const int64_t kept_stride = m.n.kept_stride;
  for (int i = 0; i < 16; ++i) {
    const int a = i / 8 * 16 + i % 8, pair = (row + i / 8 * 16) / 2 + i % 8;
    const float *s = m.scores + a * kPieceStride, *d = m.dweights + a * kPieceStride;
    const float lse[2] = {m.lse[row + a], m.lse[row + a + 8]};
    const float delta[2] = {m.delta[row + a], m.delta[row + a + 8]};
    const uint16_t* kept = m.kept + (row + a) * kept_stride + column / 16;
    bf16* gradients = m.gradients + (row + a) * m.gradient_stride + column;
    for (int j = 0; j < columns; j += 32) {
      const uint32_t inside = first_columns(k_len - column - j);
      f32v w[2][2][kVectors], g[2][2][kVectors];  // [columns / 16][row]
#pragma GCC unroll 2
      for (int y = 0; y < 2; ++y) {
        const uint32_t stays =
            dropout ? inside & load_bits<uint32_t>(kept + y * 8 * kept_stride + j / 16) : inside;
#pragma GCC unroll 8
        for (int x = 0; x < 2 * kVectors; ++x) {
          const int64_t here = y * 8 * kPieceStride + j + kLanes * x;
          const uint32_t stay = stays >> (kLanes * x);
          const f32v weight =
              masked(exp2_short(load(s + here) * scale - lse[y]), inside >> (kLanes * x));
          const f32v dweight = masked(load(d + here) * keep, stay);
          w[x / kVectors][y][x % kVectors] = masked(weight, stay);
          g[x / kVectors][y][x % kVectors] = weight * (dweight - delta[y]);
        }
      }
#pragma GCC unroll 2
      for (int x = 0; x < 2; ++x) {
        const int64_t panel = static_cast<int64_t>(column + j + 16 * x) * rows;
        store_bits(m.weight_pairs + panel + pair * 2 * kPairColumns,
                   interleave(narrow_two(w[x][0], w[x][1])));
        store_bits(m.gradient_pairs + panel + pair * 2 * kPairColumns,
                   interleave(narrow_two(g[x][0], g[x][1])));
      }
#pragma GCC unroll 2
      for (int y = 0; y < 2; ++y)
        store_bits(gradients + y * 8 * m.gradient_stride + j, narrow_two(g[0][y], g[1][y]));
    }
  }
}

// Rounds the transposed sums [columns][stride] to rows of head_dim.
void round_transposed(const float* sums, int64_t stride, int rows, int columns, float factor,
                      bf16* out, int64_t out_stride) {
  for (int r = 0; r < rows; r += 16)
    for (int c = 0; c < columns; c += 16) {
      Words block[16];
      for (int i = 0; i < 16; ++i) block[i] = load_bits<Words>(sums + (c + i) * stride + r);
      transpose16(block);
      for (int i = 0; i < 16 && r + i < rows; ++i)
        round_row(reinterpret_cast<const float*>(block + i), columns - c < 16 ? columns - c : 16,
                  factor, out + (r + i) * out_stride + c);
    }
}

void backward_task(const AttentionCpuParams& p, const AttentionTask& t, float* memory) {
  Scratch scratch{reinterpret_cast<char*>(memory)};
  const Backward m(scratch, t.q_len, t.k_len, p.head_dim);
  const Sizes& n = m.n;
  const int d = p.head_dim;
  const TileRegisters tiles;
  const bf16* k = at<bf16>(p.k, t.k_begin, t.head);
  pack_pairs_transposed(k, p.k.token_stride, t.k_len, d, n.keys, n.depth, m.k_transposed);
  pack_pairs(k, p.k.token_stride, t.k_len, d, n.keys, m.k);
  pack_pairs_transposed(at<bf16>(p.v, t.k_begin, t.head), p.v.token_stride, t.k_len, d, n.keys,
                        n.depth, m.v_transposed);

  const bool dropout = p.keep_threshold != 65536u;
  const int64_t key_panel = n.depth * kPairColumns;
  for (int first = 0; first < t.q_len; first += m.rows) {
    const int rows = t.q_len - first < m.rows ? t.q_len - first : m.rows;
    const int whole = round_up(rows, kPieceRows);
    const int64_t token = t.q_begin + first;
    const bf16 *dout = at<bf16>(p.dout, token, t.head), *out = at<bf16>(p.out, token, t.head);
    copy_rows(at<bf16>(p.q, token, t.head), p.q.token_stride, rows, d, whole, n.depth, m.q);
    copy_rows(dout, p.dout.token_stride, rows, d, whole, n.depth, m.dout);
    transpose_rows(m.q, n.depth, whole, n.columns, m.q_transposed);
    transpose_rows(m.dout, n.depth, whole, n.columns, m.dout_transposed);
    for (int r = 0; r < whole; ++r) {
      m.lse[r] = kInfinity;  // weights of 0
      m.delta[r] = 0.0f;
      if (r >= rows) continue;
      f32v sum = {};
      for_columns(d, [&](int64_t j, auto width) {
        sum += load(out + r * p.out.token_stride + j, width) * load(m.dout + r * n.depth + j);
      });
      m.lse[r] = p.lse[t.head * p.q_tokens + token + r] * kLog2e;
      m.delta[r] = reduce_add(sum);
    }
    if (dropout) draw_kept(p, t, first, whole, n, m.kept);
    for (int row = 0; row < whole; row += kPieceRows)
      for (int column = 0; column < n.keys; column += kPieceColumns) {
        const int columns = n.keys - column < kPieceColumns ? n.keys - column : kPieceColumns;
        const int64_t panel = column / kPairColumns * key_panel;
        gemm_bf16({m.q + row * n.depth, n.depth}, kPieceRows, {m.k_transposed + panel, key_panel},
                  columns, n.depth, m.scores, kPieceStride, false);
        gemm_bf16({m.dout + row * n.depth, n.depth}, kPieceRows,
                  {m.v_transposed + panel, key_panel}, columns, n.depth, m.dweights, kPieceStride,
                  false);
        piece(p, m, whole, t.k_len, row, column, columns);
      }
    const int64_t row_panel = whole * kPairColumns;
    gemm_bf16({m.dout_transposed, whole}, n.columns, {m.weight_pairs, row_panel}, n.keys, whole,
              m.dv, m.sum_stride, first > 0);
    gemm_bf16({m.q_transposed, whole}, n.columns, {m.gradient_pairs, row_panel}, n.keys, whole,
              m.dk, m.sum_stride, first > 0);
    gemm_bf16({m.gradients, m.gradient_stride}, round_up(rows, 16), {m.k, n.keys * kPairColumns},
              n.columns, n.keys, m.dq, n.columns, false);
    bf16* dq = at<bf16>(p.dq, token, t.head);
    for (int r = 0; r < rows; ++r)
      round_row(m.dq + r * n.columns, d, p.scale, dq + r * p.dq.token_stride);
  }
  if (t.q_len == 0)
    for (int64_t i = 0; i < n.columns * m.sum_stride; ++i) m.dk[i] = m.dv[i] = 0.0f;
  round_transposed(m.dk, m.sum_stride, t.k_len, d, p.scale, at<bf16>(p.dk, t.k_begin, t.head),
                   p.dk.token_stride);
  round_transposed(m.dv, m.sum_stride, t.k_len, d, keep_scale(p.keep_threshold),
                   at<bf16>(p.dv, t.k_begin, t.head), p.dv.token_stride);
}

int64_t scratch_floats(int q_len, int k_len, int head_dim, bool backward) {
  Scratch scratch{nullptr};
  if (backward)
    Backward(scratch, q_len, k_len, head_dim);
  else
    Forward(scratch, k_len, head_dim);
  return scratch.bytes / 4;
}

}  // namespace

extern const AttentionKernels attention_bf16_kernels = {scratch_floats, forward_task,
                                                        backward_task};

}  // namespace bert_unpad::BERT_UNPAD_ISA
