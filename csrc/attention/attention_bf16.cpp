// CPU attention of one task in bf16, forward and backward, on CPUs that multiply bf16. Blocks of
// queries, windows and parts of the keys are as in attention_fp32.cpp.
//
// Products take bf16 and add in fp32; softmax and dropout are in fp32, and probabilities and the
// gradients of scores are rounded to bf16 once, for the products that read them. Scores are never
// stored beyond a block of rows. What is read as pairs of rows (see cpu/gemm_bf16.h) is written
// that way: K and V once per task, weights and gradients of scores by the pass that computes them.
//
// In the backward pass dK and dV are summed up transposed, as dK^T = Q^T dS: so dS is a right-hand
// side, whose pairs of rows are r and r + 8 of 16, the rows whose dropout bits come together.
#include "attention/attention.h"
#include "attention/bias_simd.h"
#include "attention/softmax_bf16.h"
#include "attention/task_simd.h"
#include "cpu/columns_simd.h"
#include "cpu/gemm_bf16.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

constexpr AttentionSplit kQueries = {1536, 1024}, kKeys = {768, 512};
constexpr AttentionSplit kForwardKeys = {2048, 1024};  // of a pass of the softmax
constexpr int kColumns = 32;  // columns of a block begin at a multiple of it

constexpr int kForwardRows = 64;
// Scores of the backward pass are computed and used up in pieces of this size, in the first-level
// cache.
constexpr int kPieceRows = 32, kPieceColumns = 128;
constexpr int kPieceStride = kPieceColumns + 16;  // spreads rows over the sets of the cache

// Rows of a block in the backward pass: three bf16 matrices [rows, keys] stay in the second-level
// cache. In a narrow window fewer, because a block has columns that only some of its rows see.
int backward_rows(const AttentionCpuParams& p, int q_len, int keys) {
  const int fit = 65536 / (keys + 1) / kPieceRows * kPieceRows;
  const int most = narrow(p, keys) ? 64 : 128, needed = round_up(q_len, kPieceRows);
  const int rows = fit < kPieceRows ? kPieceRows : fit > most ? most : fit;
  return rows < needed ? rows : needed;
}

// Sizes as the products need them.
struct Sizes {
  int keys, depth, columns;  // of a part to 32; head_dim to 32 and to 16
  int kept_stride;           // of draw_kept, which writes the bits of 64 columns at a time
  Sizes(int most_keys, int head_dim)
      : keys(round_up(most_keys, 32)),
        depth(round_up(head_dim, 32)),
        columns(round_up(head_dim, 16)),
        kept_stride(keys / 16 + 4) {}
};

struct Forward {
  Range keys;  // that the task sees
  int part;    // keys of a part
  bool several;
  Sizes n;
  bf16 *k, *v, *q, *weights;
  float *scores, *out, *maxima, *sums;
  uint16_t* kept;
  int64_t score_stride, weight_stride;
  BiasRows<bf16> bias;

  Forward(Scratch& scratch, const AttentionCpuParams& p, const AttentionTask& t)
      : keys(aligned(seen(p, t, {t.first, t.last}), kColumns)),
        part(part_size(keys.size(), kForwardKeys)),
        several(keys.size() > part),
        n(keys.size() > 0 ? part : 0, p.head_dim),
        bias(scratch, p, t, kForwardRows, n.keys, false) {
    const int rows = several ? round_up(t.last - t.first, kForwardRows) : kForwardRows;
    score_stride = n.keys + 16;
    weight_stride = n.keys + 32;
    k = scratch.take<bf16>(static_cast<int64_t>(n.keys) * n.depth);
    v = scratch.take<bf16>(static_cast<int64_t>(n.keys) * n.columns);
    q = scratch.take<bf16>(kForwardRows * n.depth);
    weights = scratch.take<bf16>(kForwardRows * weight_stride);
    scores = scratch.take<float>(kForwardRows * score_stride);
    out = scratch.take<float>(static_cast<int64_t>(rows) * n.columns);
    maxima = scratch.take<float>(rows);
    sums = scratch.take<float>(rows);
    kept = scratch.take<uint16_t>(kForwardRows * n.kept_stride);
  }
};

struct Backward {
  Sizes n;
  int rows;
  bf16 *k_transposed, *v_transposed, *k, *q, *dout, *q_transposed, *dout_transposed;
  bf16 *weight_pairs, *gradient_pairs, *gradients;  // dropped weights, gradients of scores
  float *scores, *dweights, *dq, *dk, *dv, *lse, *delta;
  Range* seen;  // by each row of a block, of its columns
  uint16_t* kept;
  int64_t gradient_stride, sum_stride;
  BiasRows<bf16> bias;

  Backward(Scratch& scratch, const AttentionCpuParams& p, const AttentionTask& t)
      : n(t.last - t.first, p.head_dim),
        rows(backward_rows(p, t.q_len, t.key_part)),
        bias(scratch, p, t, rows, n.keys, true) {
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
    seen = scratch.take<Range>(rows);
    kept = scratch.take<uint16_t>(static_cast<int64_t>(rows) * n.kept_stride);
  }
};

// What a score is still to be multiplied with; with a position bias it is scaled before.
BU_INLINE float score_scale(const AttentionCpuParams& p) {
  return p.bias.bucket ? 1.0f : p.scale * kLog2e;
}

// out = x * factor, rounded.
BU_INLINE void round_row(const float* x, int columns, float factor, bf16* out) {
  for_columns(columns, [&](int64_t j, auto width) { store(out + j, load(x + j) * factor, width); });
}

// A block of rows with one part of the keys, of which it sees `columns`.
void forward_block(const AttentionCpuParams& p, const AttentionTask& t, const Forward& m,
                   Range rows, Range keys, Range columns, bool begins, bool ends) {
  const Sizes& n = m.n;
  const int d = p.head_dim, count = rows.size(), whole = round_up(count, 16);
  const int column = columns.first - keys.first, width = round_up(columns.size(), 32);
  const int64_t token = t.q_begin + rows.first, first = m.several ? rows.first - t.first : 0;
  float *out = m.out + first * n.columns, *maxima = m.maxima + first, *sums = m.sums + first;
  const bool dropout = p.keep_threshold != 65536u;
  copy_rows(at<bf16>(p.q, token, t.head), p.q.token_stride, count, d, whole, n.depth, m.q);
  gemm_bf16({m.q, n.depth}, whole, {m.k + column * n.depth, n.depth * kPairColumns}, width, n.depth,
            m.scores, m.score_stride, false);
  if (dropout) draw_kept(p, t, t.head, rows, columns, n.kept_stride, m.kept);
  for (int r = 0; r < count; ++r) {
    if (begins) {
      maxima[r] = -kInfinity;
      sums[r] = 0.0f;
    }
    const Range here = seen_among(p, t, rows.first + r, columns);
    float* scores = m.scores + r * m.score_stride;
    if (m.bias) m.bias.add(t.head, rows.first + r, columns, here, p.scale * kLog2e, scores);
    const float factor = softmax_row(scores, here, width, score_scale(p),
                                     dropout ? m.kept + r * n.kept_stride : nullptr,
                                     m.weights + r * m.weight_stride, maxima[r], sums[r]);
    if (!begins && factor != 1.0f)
      for (float *x = out + r * n.columns, *end = x + n.columns; x < end; x += kLanes)
        store(x, load(x) * factor);
  }
  for (int r = count; r < whole; ++r)
    for (int j = 0; j < width; j += 32) store_bits(m.weights + r * m.weight_stride + j, Words{});
  gemm_bf16({m.weights, m.weight_stride}, whole,
            {m.v + column * kPairColumns, n.keys * kPairColumns}, n.columns, width, out, n.columns,
            !begins);
  if (!ends) return;
  const float keep = keep_scale(p.keep_threshold);
  float* lse = p.lse + t.head * p.q_tokens + token;
  for (int r = 0; r < count; ++r) {  // a sum of 0: the query sees no keys
    lse[r] = maxima[r] * kLn2 + __builtin_logf(sums[r]);
    round_row(out + r * n.columns, d, sums[r] == 0.0f ? 0.0f : keep / sums[r],
              at<bf16>(p.out_w, token + r, t.head));
  }
}

void forward_task(const AttentionCpuParams& p, const AttentionTask& t, float* memory) {
  Scratch scratch{reinterpret_cast<char*>(memory)};
  const Forward m(scratch, p, t);
  const Sizes& n = m.n;
  const int d = p.head_dim, kv_head = key_head(p, t.head);
  const TileRegisters tiles;
  Range keys = {m.keys.first, m.keys.first};
  do {
    keys = both({keys.last, keys.last + m.part}, m.keys);
    const int64_t key = t.k_begin + keys.first;
    pack_pairs_transposed(at<bf16>(p.k, key, kv_head), p.k.token_stride, keys.size(), d, n.keys,
                          n.depth, m.k);
    pack_pairs(at<bf16>(p.v, key, kv_head), p.v.token_stride, keys.size(), d, n.keys, m.v);
    for (int first = t.first; first < t.last; first += kForwardRows) {
      const Range rows = both({first, first + kForwardRows}, {t.first, t.last});
      const Range sees = seen(p, t, rows), columns = both(sees, keys);
      if (sees.size() == 0 && keys.first == m.keys.first)
        forward_block(p, t, m, rows, keys, columns, true, true);
      else if (columns.size() > 0)
        forward_block(p, t, m, rows, keys, aligned(columns, kColumns), sees.first >= keys.first,
                      sees.last <= keys.last);
    }
  } while (keys.last < m.keys.last);
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
BU_INLINE void piece(const AttentionCpuParams& p, const Backward& m, int rows, int row, int column,
                     int columns) {
  const float scale = score_scale(p), keep = keep_scale(p.keep_threshold);
  const bool dropout = p.keep_threshold != 65536u;
  const int64_t kept_stride = m.n.kept_stride;
  for (int i = 0; i < 16; ++i) {
    const int a = i / 8 * 16 + i % 8, pair = (row + i / 8 * 16) / 2 + i % 8;
    const float *s = m.scores + a * kPieceStride, *d = m.dweights + a * kPieceStride;
    const float lse[2] = {m.lse[row + a], m.lse[row + a + 8]};
    const float delta[2] = {m.delta[row + a], m.delta[row + a + 8]};
    const uint16_t* kept = m.kept + (row + a) * kept_stride + column / 16;
    bf16* gradients = m.gradients + (row + a) * m.gradient_stride + column;
    const Range seen[2] = {shifted(m.seen[row + a], column), shifted(m.seen[row + a + 8], column)};
    for (int j = 0; j < columns; j += 32) {
      f32v w[2][2][kVectors], g[2][2][kVectors];  // [columns / 16][row]
#pragma GCC unroll 2
      for (int y = 0; y < 2; ++y) {
        const uint32_t inside = columns_in(seen[y], j);
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

// A block of rows of one head with the task's keys, of which it sees `columns`.
void backward_block(const AttentionCpuParams& p, const AttentionTask& t, const Backward& m,
                    int head, Range rows, Range columns, const Turn& turn) {
  const Sizes& n = m.n;
  const int d = p.head_dim, count = rows.size(), whole = round_up(count, kPieceRows);
  const int column = columns.first - t.first, width = round_up(columns.size(), 32);
  const int64_t token = t.q_begin + rows.first;
  const bf16 *dout = at<bf16>(p.dout, token, head), *out = at<bf16>(p.out, token, head);
  copy_rows(at<bf16>(p.q, token, head), p.q.token_stride, count, d, whole, n.depth, m.q);
  copy_rows(dout, p.dout.token_stride, count, d, whole, n.depth, m.dout);
  transpose_rows(m.q, n.depth, whole, n.columns, m.q_transposed);
  transpose_rows(m.dout, n.depth, whole, n.columns, m.dout_transposed);
  for (int r = 0; r < whole; ++r) {
    m.lse[r] = kInfinity;  // weights of 0
    m.delta[r] = 0.0f;
    m.seen[r] = {0, 0};
    if (r >= count) continue;
    f32v sum = {};
    for_columns(d, [&](int64_t j, auto lanes) {
      sum += load(out + r * p.out.token_stride + j, lanes) * load(m.dout + r * n.depth + j);
    });
    m.lse[r] = p.lse[head * p.q_tokens + token + r] * kLog2e;
    m.delta[r] = reduce_add(sum);
    m.seen[r] = seen_among(p, t, rows.first + r, columns);
  }
  if (p.keep_threshold != 65536u)
    draw_kept(p, t, head, {rows.first, rows.first + whole}, columns, n.kept_stride, m.kept);
  const int64_t key_panel = n.depth * kPairColumns;
  for (int row = 0; row < whole; row += kPieceRows)
    for (int c = 0; c < width; c += kPieceColumns) {
      const int some = width - c < kPieceColumns ? width - c : kPieceColumns;
      const int64_t panel = (column + c) / kPairColumns * key_panel;
      gemm_bf16({m.q + row * n.depth, n.depth}, kPieceRows, {m.k_transposed + panel, key_panel},
                some, n.depth, m.scores, kPieceStride, false);
      gemm_bf16({m.dout + row * n.depth, n.depth}, kPieceRows, {m.v_transposed + panel, key_panel},
                some, n.depth, m.dweights, kPieceStride, false);
      if (m.bias)
        for (int r = row; r < row + kPieceRows && r < count; ++r)
          m.bias.add(head, rows.first + r, shifted({0, some}, -columns.first - c),
                     both(shifted(m.seen[r], c), {0, some}), p.scale * kLog2e,
                     m.scores + (r - row) * kPieceStride);
      piece(p, m, whole, row, c, some);
    }
  if (m.bias)
    for (int r = 0; r < count; ++r) {
      m.bias.set_buckets(rows.first + r, columns);
      m.bias.add_gradients(r, rows.first + r, columns, m.seen[r],
                           m.gradients + r * m.gradient_stride);
    }
  const int64_t row_panel = whole * kPairColumns;
  gemm_bf16({m.dout_transposed, whole}, n.columns, {m.weight_pairs, row_panel}, width, whole,
            m.dv + column, m.sum_stride, true);
  gemm_bf16({m.q_transposed, whole}, n.columns, {m.gradient_pairs, row_panel}, width, whole,
            m.dk + column, m.sum_stride, true);
  gemm_bf16({m.gradients, m.gradient_stride}, round_up(count, 16),
            {m.k + column * kPairColumns, n.keys * kPairColumns}, n.columns, width, m.dq, n.columns,
            false);
  const float* dq = turn.several ? dq_sums(p, head, token) : m.dq;
  turn.wait(p);
  if (turn.several) {
    float* sums = dq_sums(p, head, token);
    for (int i = 0; i < count * n.columns; i += kLanes)
      store(sums + i, turn.mine > turn.first ? load(sums + i) + load(m.dq + i) : load(m.dq + i));
  }
  if (m.bias) m.bias.add_query_sums(head, rows, turn);
  turn.end();
  if (turn.mine == turn.last)
    for (int r = 0; r < count; ++r)
      round_row(dq + r * n.columns, d, p.scale, at<bf16>(p.dq, token + r, head));
}

void backward_task(const AttentionCpuParams& p, const AttentionTask& t, float* memory) {
  Scratch scratch{reinterpret_cast<char*>(memory)};
  const Backward m(scratch, p, t);
  const Sizes& n = m.n;
  const int d = p.head_dim, keys = t.last - t.first, group = p.heads / p.kv_heads;
  const int64_t key = t.k_begin + t.first;
  const TileRegisters tiles;
  const bf16 *k = at<bf16>(p.k, key, t.head), *v = at<bf16>(p.v, key, t.head);
  pack_pairs_transposed(k, p.k.token_stride, keys, d, n.keys, n.depth, m.k_transposed);
  pack_pairs(k, p.k.token_stride, keys, d, n.keys, m.k);
  pack_pairs_transposed(v, p.v.token_stride, keys, d, n.keys, n.depth, m.v_transposed);
  for (int64_t i = 0; i < n.columns * m.sum_stride; ++i) m.dk[i] = m.dv[i] = 0.0f;

  for (int head = t.head * group; head < (t.head + 1) * group; ++head) {
    if (m.bias) m.bias.begin_head();
    for (int first = 0; first < t.q_len; first += m.rows) {
      const Range rows = both({first, first + m.rows}, {0, t.q_len}), sees = seen(p, t, rows);
      const Turn turn(p, t, head, first, sees);
      if (turn.taken())
        backward_block(p, t, m, head, rows, aligned(both(sees, {t.first, t.last}), kColumns), turn);
    }
    if (m.bias) m.bias.end_head(head);
  }
  round_transposed(m.dk, m.sum_stride, keys, d, p.scale, at<bf16>(p.dk, key, t.head),
                   p.dk.token_stride);
  round_transposed(m.dv, m.sum_stride, keys, d, keep_scale(p.keep_threshold),
                   at<bf16>(p.dv, key, t.head), p.dv.token_stride);
}

int64_t scratch_floats(const AttentionCpuParams& p, const AttentionTask& t, bool backward) {
  Scratch scratch{nullptr};
  if (backward)
    Backward(scratch, p, t);
  else
    Forward(scratch, p, t);
  return scratch.bytes / 4;
}

}  // namespace

extern const AttentionKernels attention_bf16_kernels = {
    kQueries, kKeys, scratch_floats, forward_task, backward_task,
};

}  // namespace bert_unpad::BERT_UNPAD_ISA
