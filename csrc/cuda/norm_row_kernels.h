// LayerNorm's and RMSNorm's forward and backward pass over rows. Memory is the limit: operands are
// read once, the row stays in registers between its statistics and its output, and results are
// written once.
//
// Each operator says what is normalised and what happens to the result, by its `Row` type:
//   Row(params)                              of all threads, once
//   begin(row)                               before anything of a row is read
//   Raw load<kWide>(column, count)           a group of the operands, as it is in memory
//   input_bias()                             a parameter that `input` needs, or a null one
//   input(raw, column, parameters, mask, z)  the LayerNorm's input, in fp32
//   keep_input<kWide>(column, count, z)      may store that input, and then rounds it as stored
//   output<kWide>(column, count, mask, y)    takes the LayerNorm's result
//   gradient<kWide>(column, count)           a group of dy, as it is in memory
//   result_gradient(group, mask, d)          the gradient of the LayerNorm's result, in fp32
//   input_gradient<kWide>(raw, column, count, mask, dz, sums)   takes the gradient of its input
//   input_bias_gradient()                    where the third column sum goes, where there is one
// If the params' kCopiedAhead, operands and dy of 16 bits are copied while the row before is worked
// on. Then the type also has, for one of their groups,
//   operand(i, row, column)          where operand `i` has it, dy being the last; null for none
//   take<kVectors>(next, v)          what `load` returns, of group v of each operand
// `mask` says which columns dropout keeps, before or after the LayerNorm. kSums is the number of
// column sums of the backward pass (2: dweight and dbias; 3: also the one that input_gradient adds
// to). The params have a member `norm`, a RowNormParams.
//
// A row is held by a warp, or by a block where kBlockRow; a thread has kVectors groups of 8
// columns. Other shapes: cuda/norm_row_general.h.
#pragma once

#include <cmath>
#include <type_traits>

#include "cuda/architecture.h"
#include "cuda/last_block.h"
#include "cuda/norm_row_params.h"
#include "cuda/norm_row_parts.h"
#include "cuda/sum_rows.h"

namespace bert_unpad {

// How many operands of a row are copied ahead; 0: none, as on Blackwell, where registers would not
// be enough.
template <class Params, class Row, bool kBlockRow>
inline constexpr int kOperandsAhead = Params::kCopiedAhead && !kBlockRow && !kTuring &&
                                              !kBlackwell && sizeof(typename Row::Activation) == 2
                                          ? Params::kRowOperands
                                          : 0;

// Starts copying what a thread needs of a row; nothing beyond the last one.
template <int kOperands, int kVectors, class Row, class Share>
BU_DEVICE void copy_ahead(const NextGroups& next, const Row& row_of, const Share& share,
                          const cuda::RowNormParams& p, int64_t row) {
  if (row < p.rows) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (share.column(v) >= p.hidden) break;
#pragma unroll
      for (int i = 0; i < kOperands; ++i) {
        const void* from = row_of.operand(i, row, share.column(v));
        if (from != nullptr) next.copy(i * kVectors + v, from);
      }
    }
  }
  copy_async_commit();
}

enum ParameterNumber { kWeight, kInputBias, kBias };

// Bytes of shared memory that a block needs.
template <bool kBlockRow>
constexpr uint32_t forward_shared_bytes(int64_t hidden) {
  return RowSum<kBlockRow>::kBytes + SharedParameters::bytes(hidden, 3);
}

// Which rows and columns are a thread's.
template <bool kBlockRow>
struct RowShare {
  int thread, threads;
  int64_t first, step;

  BU_DEVICE RowShare()
      : thread(threadIdx.x),
        threads(kBlockRow ? static_cast<int>(blockDim.x) : 32),
        first(static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y),
        step(static_cast<int64_t>(gridDim.x) * blockDim.y) {}

  BU_DEVICE int column(int v) const { return (v * threads + thread) * kGroup; }
};

// 1 / sqrt(variance + eps).
BU_DEVICE float reciprocal_deviation(float squares, float inverse_hidden, float eps) {
  return 1.0f / std::sqrt(fma(squares, inverse_hidden, eps));
}

// From this thread's part of a row's sum; 0 for RMSNorm.
template <bool kBlockRow>
BU_DEVICE float mean_of_row(const cuda::RowNormParams& p, float (&sum)[1], float inverse_hidden,
                            RowSum<kBlockRow>& sum_over_row) {
  if (p.mean == nullptr) return 0.0f;
  sum_over_row(sum);
  return sum[0] * inverse_hidden;
}

BU_DEVICE void store_statistics(const cuda::RowNormParams& p, int64_t row, float mean, float rstd) {
  if (p.mean != nullptr) store_global<float>(p.mean + row, mean);
  store_global<float>(p.rstd + row, rstd);
}

BU_DEVICE float load_mean(const cuda::RowNormParams& p, int64_t row) {
  return p.mean == nullptr ? 0.0f : load_global<float>(p.mean + row);
}

BU_DEVICE void normalise(float (&z)[kGroup], float mean, float rstd, const float (&weight)[kGroup],
                         const float (&bias)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) z[i] = fma((z[i] - mean) * rstd, weight[i], bias[i]);
}

// Which rows a thread takes in the forward pass, one after the other: as many of them as there are.
template <bool kBlockRow>
struct EveryRow {
  const int64_t rows, step;
  int64_t row;

  template <class Params, class Row>
  BU_DEVICE EveryRow(const Params& params, const Row&, const RowShare<kBlockRow>& share)
      : rows(params.norm.rows), step(share.step), row(share.first) {}

  BU_DEVICE bool more() const { return row < rows; }
  BU_DEVICE bool has_row() const { return true; }
  BU_DEVICE void next() { row += step; }
};

// Rows: which rows, like EveryRow; of a thread without a row, it may take part in what `next` does.
// Returns the row's type as the last row left it.
template <class Row, int kVectors, bool kBlockRow, class Rows = EveryRow<kBlockRow>, class Params>
BU_DEVICE Row forward_rows(const Params& params) {
  const cuda::RowNormParams& p = params.norm;
  const int hidden = static_cast<int>(p.hidden);
  const float inverse = 1.0f / static_cast<float>(hidden);
  const RowShare<kBlockRow> share;
  Row row_of(params);
  Rows at(params, row_of, share);
  constexpr int kAhead =
      std::is_same_v<Rows, EveryRow<kBlockRow>> ? kOperandsAhead<Params, Row, kBlockRow> : 0;
  const NextGroups next(forward_shared_bytes<kBlockRow>(hidden), blockDim.x * blockDim.y);
  if constexpr (kAhead > 0) copy_ahead<kAhead, kVectors>(next, row_of, share, p, at.row);
  const RowDropout dropout(p.rng, p.keep_threshold);
  RowSum<kBlockRow> sum_over_row(0);
  const SharedParameters parameters(RowSum<kBlockRow>::kBytes, hidden);
  parameters.put(kWeight, {p.weight, p.parameter_dtype}, hidden);
  parameters.put(kBias, {p.bias, p.parameter_dtype}, hidden);
  parameters.put(kInputBias, row_of.input_bias(), hidden);
  sync_block();
  for (; at.more(); at.next()) {
    if (!at.has_row()) continue;
    const int64_t row = at.row;
    row_of.begin(row);
    typename Row::Raw raw[kVectors];
    if constexpr (kAhead > 0) copy_async_wait<0>();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (share.column(v) >= hidden) break;
      if constexpr (kAhead > 0)
        raw[v] = row_of.template take<kVectors>(next, v);
      else
        raw[v] = row_of.template load<true>(share.column(v), kGroup);
    }
    if constexpr (kAhead > 0)
      copy_ahead<kAhead, kVectors>(next, row_of, share, p, row + share.step);
    float z[kVectors][kGroup], sum[1] = {0.0f};
    uint32_t masks[kVectors];
    dropout.kept(row, share.thread, share.threads, masks);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (share.column(v) >= hidden) break;
      row_of.input(raw[v], share.column(v), parameters, masks[v], z[v]);
      row_of.template keep_input<true>(share.column(v), kGroup, z[v]);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) sum[0] += z[v][i];
    }
    const float mean = mean_of_row(p, sum, inverse, sum_over_row);
    sum[0] = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (share.column(v) >= hidden) break;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) sum[0] = fma(z[v][i] - mean, z[v][i] - mean, sum[0]);
    }
    sum_over_row(sum);
    const float rstd = reciprocal_deviation(sum[0], inverse, p.eps);
    if (share.thread == 0) store_statistics(p, row, mean, rstd);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (share.column(v) >= hidden) break;
      float weight[kGroup], bias[kGroup];
      parameters.get(kWeight, share.column(v), weight);
      parameters.get(kBias, share.column(v), bias);
      normalise(z[v], mean, rstd, weight, bias);
      row_of.template output<true>(share.column(v), kGroup, masks[v], z[v]);
    }
  }
  return row_of;
}

// xhat from the LayerNorm's input; adds what a group gives to its column sums and to the row's sums
// of g = d * weight and of g * xhat.
BU_DEVICE void differentiate(float (&xhat)[kGroup], const float (&d)[kGroup], float mean,
                             float rstd, const float (&weight)[kGroup], float* dweight,
                             float* dbias, float (&sums)[2]) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    xhat[i] = (xhat[i] - mean) * rstd;
    dweight[i] = fma(d[i], xhat[i], dweight[i]);
    dbias[i] += d[i];
    const float g = d[i] * weight[i];
    sums[0] += g;
    sums[1] = fma(g, xhat[i], sums[1]);
  }
}

// d becomes the gradient of the norm's input; `sums` are those over the row.
BU_DEVICE void project(const cuda::RowNormParams& p, float (&d)[kGroup],
                       const float (&xhat)[kGroup], float rstd, float inverse,
                       const float (&weight)[kGroup], const float (&sums)[2]) {
  const float factor = rstd * inverse, b = sums[1] * factor;
  const float a = p.mean == nullptr ? 0.0f : sums[0] * factor;  // a mean has a gradient
#pragma unroll
  for (int i = 0; i < kGroup; ++i) d[i] = fma(d[i] * weight[i], rstd, -fma(xhat[i], b, a));
}

template <bool kBlockRow>
constexpr uint32_t backward_shared_bytes(int64_t hidden, uint32_t rows) {
  const uint32_t parameters = RowSum<kBlockRow>::kBytes + SharedParameters::bytes(hidden, 2);
  const uint32_t sums = kBlockRow ? 0 : rows * static_cast<uint32_t>(hidden) * 4;
  return parameters > sums ? parameters : sums;
}

// Rows of partial sums that are added up at once.
inline constexpr int kSumsAtOnce = 8;

// Where the column sums of the backward pass lie and go.
template <class Row>
struct ColumnSums {
  const cuda::RowNormParams& p;
  RowGroups groups;
  Result results[Row::kSums];

  BU_DEVICE ColumnSums(const cuda::RowNormParams& p, const Row& row_of)
      : p(p), groups(static_cast<int>(gridDim.x), kSumsAtOnce) {
    results[0] = {p.dweight, p.parameter_dtype};
    results[1] = {p.dbias, p.parameter_dtype};
    if constexpr (Row::kSums == 3) results[2] = row_of.input_bias_gradient();
  }

  // Row `row` of the partial sums of number `s`.
  BU_DEVICE float* row(int s, int row) const {
    return p.partials + (static_cast<int64_t>(s) * groups.scratch_rows() + row) * p.hidden;
  }

  // By all threads of the block, after they have written its row. N: columns that a thread adds up
  // at once; `hidden` is a multiple.
  template <int N>
  BU_DEVICE void finish() const {
    finish_sums(groups, blockIdx.x, p.tickets, 0, [&](int first, int count, int to) {
      const int hidden = static_cast<int>(p.hidden), threads = blockDim.x * blockDim.y;
#pragma unroll
      for (int s = 0; s < Row::kSums; ++s) {
        if (results[s].p == nullptr) continue;
        for (int column = (threadIdx.y * blockDim.x + threadIdx.x) * N; column < hidden;
             column += threads * N) {
          float sum[N] = {};
          sum_rows<8>(sum, count, [&](int r) { return row(s, first + r) + column; });
          if (to != kResult) {
            store_vector<float, N>(row(s, to) + column, sum);
            continue;
          }
#pragma unroll
          for (int i = 0; i < N; ++i)
            store_parameter(results[s].p, results[s].dtype, column + i, sum[i]);
        }
      }
    });
  }
};

template <class Row, int kVectors, bool kBlockRow, class Params>
BU_DEVICE void backward_rows(const Params& params) {
  const cuda::RowNormParams& p = params.norm;
  const int hidden = static_cast<int>(p.hidden);
  const float inverse = 1.0f / static_cast<float>(hidden);
  const RowShare<kBlockRow> share;
  Row row_of(params);
  constexpr int kAhead = kOperandsAhead<Params, Row, kBlockRow>;
  const NextGroups next(backward_shared_bytes<kBlockRow>(hidden, blockDim.y),
                        blockDim.x * blockDim.y);
  const auto start = [&](int64_t row) {
    if constexpr (kAhead > 0) copy_ahead<kAhead + 1, kVectors>(next, row_of, share, p, row);
  };
  start(share.first);
  const RowDropout dropout(p.rng, p.keep_threshold);
  RowSum<kBlockRow> sum_over_row(0);
  const SharedParameters parameters(RowSum<kBlockRow>::kBytes, hidden);
  parameters.put(kWeight, {p.weight, p.parameter_dtype}, hidden);
  parameters.put(kInputBias, row_of.input_bias(), hidden);
  sync_block();
  float columns[3][kVectors * kGroup] = {};
  for (int64_t row = share.first; row < p.rows; row += share.step) {
    row_of.begin(row);
    const float mean = load_mean(p, row), rstd = load_global<float>(p.rstd + row);
    typename Row::Raw raw[kVectors];
    Group<typename Row::Activation> dy[kVectors];
    if constexpr (kAhead > 0) copy_async_wait<0>();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (share.column(v) >= hidden) break;
      if constexpr (kAhead > 0) {
        raw[v] = row_of.template take<kVectors>(next, v);
        dy[v] = next.take<typename Row::Activation>(kAhead * kVectors + v);
      } else {
        raw[v] = row_of.template load<true>(share.column(v), kGroup);
        dy[v] = row_of.template gradient<true>(share.column(v), kGroup);
      }
    }
    start(row + share.step);
    float xhat[kVectors][kGroup], sums[2] = {0.0f, 0.0f};
    uint32_t masks[kVectors];
    dropout.kept(row, share.thread, share.threads, masks);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (share.column(v) >= hidden) break;
      const int column = share.column(v);
      row_of.input(raw[v], column, parameters, masks[v], xhat[v]);
      float d[kGroup], weight[kGroup];
      row_of.result_gradient(dy[v], masks[v], d);
      parameters.get(kWeight, column, weight);
      differentiate(xhat[v], d, mean, rstd, weight, columns[0] + v * kGroup,
                    columns[1] + v * kGroup, sums);
    }
    sum_over_row(sums);
    const SharedParameters again = parameters.reloaded();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (share.column(v) >= hidden) break;
      const int column = share.column(v);
      float d[kGroup], weight[kGroup];
      row_of.result_gradient(dy[v], masks[v], d);
      again.get(kWeight, column, weight);
      project(p, d, xhat[v], rstd, inverse, weight, sums);
      row_of.template input_gradient<true>(raw[v], column, kGroup, masks[v], d,
                                           columns[2] + v * kGroup);
    }
  }
  // What the block adds to the column sums: of a row held by a block each thread has its own
  // columns, else all warps add up those of all.
  const ColumnSums<Row> column_sums(p, row_of);
#pragma unroll
  for (int s = 0; s < Row::kSums; ++s) {
    if (column_sums.results[s].p == nullptr) continue;
    float* const out = column_sums.row(s, blockIdx.x);
    if constexpr (!kBlockRow) sync_block();  // the parameters, or the sums before, were read
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (share.column(v) >= hidden) break;
      float group[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) group[i] = columns[s][v * kGroup + i];
      if constexpr (kBlockRow)
        store_group<true>(out + share.column(v), group, kGroup);
      else
        store_shared_row(4 * (threadIdx.y * hidden + share.column(v)), group);
    }
    if constexpr (!kBlockRow) {
      sync_block();
      sum_shared_rows<4>(0, hidden, [&](int column, const float (&sum)[4]) {
        store_vector<float, 4>(out + column, sum);
      });
    }
  }
  column_sums.template finish<4>();
}

}  // namespace bert_unpad
