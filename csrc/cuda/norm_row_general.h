// LayerNorm over rows of any length at any address, slowly: a block reads its row again in each
// step, element by element, and keeps its column sums in its own row of scratch memory. For `Row`
// see cuda/norm_row_kernels.h.
#pragma once

#include "cuda/norm_row_kernels.h"

namespace bert_unpad {

// body(column, count, raw) for the groups of a row that are this thread's.
template <class Row, class Body>
BU_DEVICE void for_groups(const Row& row_of, int hidden, const Body& body) {
  for (int column = threadIdx.x * kGroup; column < hidden; column += blockDim.x * kGroup) {
    const int left = hidden - column, count = left < kGroup ? left : kGroup;
    body(column, count, row_of.template load<false>(column, count));
  }
}

template <class Row, class Params>
BU_DEVICE void forward_rows_general(const Params& params) {
  const cuda::RowNormParams& p = params.norm;
  const int hidden = static_cast<int>(p.hidden);
  const float inverse = 1.0f / static_cast<float>(hidden);
  Row row_of(params);
  const RowDropout dropout(p.rng, p.keep_threshold);
  RowSum<true> sum_over_row(0);
  const GlobalParameters parameters{
      {{p.weight, p.parameter_dtype}, row_of.input_bias(), {p.bias, p.parameter_dtype}}, hidden};
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    row_of.begin(row);
    float sum[1] = {0.0f};
    for_groups(row_of, hidden, [&](int column, int count, const typename Row::Raw& raw) {
      float z[kGroup];
      row_of.input(raw, column, parameters, dropout.kept(row, column), z);
      row_of.template keep_input<false>(column, count, z);
      for (int i = 0; i < count; ++i) sum[0] += z[i];
    });
    const float mean = mean_of_row(p, sum, inverse, sum_over_row);
    sum[0] = 0.0f;
    for_groups(row_of, hidden, [&](int column, int count, const typename Row::Raw& raw) {
      float z[kGroup];
      row_of.input(raw, column, parameters, dropout.kept(row, column), z);
      row_of.template keep_input<false>(column, count, z);
      for (int i = 0; i < count; ++i) sum[0] = fma(z[i] - mean, z[i] - mean, sum[0]);
    });
    sum_over_row(sum);
    const float rstd = reciprocal_deviation(sum[0], inverse, p.eps);
    if (threadIdx.x == 0) store_statistics(p, row, mean, rstd);
    for_groups(row_of, hidden, [&](int column, int count, const typename Row::Raw& raw) {
      float z[kGroup], weight[kGroup], bias[kGroup];
      const uint32_t mask = dropout.kept(row, column);
      row_of.input(raw, column, parameters, mask, z);
      row_of.template keep_input<false>(column, count, z);
      parameters.get(kWeight, column, weight);
      parameters.get(kBias, column, bias);
      normalise(z, mean, rstd, weight, bias);
      row_of.template output<false>(column, count, mask, z);
    });
  }
}

// Adds a group to a row of the scratch memory that only this thread touches there.
BU_DEVICE void accumulate(float* p, const float (&x)[kGroup], int count, bool first) {
  for (int i = 0; i < count; ++i)
    store_global<float>(p + i, first ? x[i] : load_global<float>(p + i) + x[i]);
}

template <class Row, class Params>
BU_DEVICE void backward_rows_general(const Params& params) {
  const cuda::RowNormParams& p = params.norm;
  const int hidden = static_cast<int>(p.hidden);
  const float inverse = 1.0f / static_cast<float>(hidden);
  Row row_of(params);
  const RowDropout dropout(p.rng, p.keep_threshold);
  RowSum<true> sum_over_row(0);
  const GlobalParameters parameters{
      {{p.weight, p.parameter_dtype}, row_of.input_bias(), {nullptr, p.parameter_dtype}}, hidden};
  const ColumnSums<Row> column_sums(p, row_of);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    row_of.begin(row);
    const bool first = row == blockIdx.x;
    const float mean = load_mean(p, row), rstd = load_global<float>(p.rstd + row);
    float sums[2] = {0.0f, 0.0f};
    for_groups(row_of, hidden, [&](int column, int count, const typename Row::Raw& raw) {
      float xhat[kGroup], d[kGroup], weight[kGroup], dweight[kGroup] = {}, dbias[kGroup] = {};
      const uint32_t mask = dropout.kept(row, column);
      row_of.input(raw, column, parameters, mask, xhat);
      row_of.result_gradient(row_of.template gradient<false>(column, count), mask, d);
      parameters.get(kWeight, column, weight);
      differentiate(xhat, d, mean, rstd, weight, dweight, dbias, sums);
      accumulate(column_sums.row(0, blockIdx.x) + column, dweight, count, first);
      accumulate(column_sums.row(1, blockIdx.x) + column, dbias, count, first);
    });
    sum_over_row(sums);
    for_groups(row_of, hidden, [&](int column, int count, const typename Row::Raw& raw) {
      float xhat[kGroup], d[kGroup], weight[kGroup], third[kGroup] = {};
      const uint32_t mask = dropout.kept(row, column);
      row_of.input(raw, column, parameters, mask, xhat);
      row_of.result_gradient(row_of.template gradient<false>(column, count), mask, d);
      parameters.get(kWeight, column, weight);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) xhat[i] = (xhat[i] - mean) * rstd;
      project(p, d, xhat, rstd, inverse, weight, sums);
      row_of.template input_gradient<false>(raw, column, count, mask, d, third);
      if constexpr (Row::kSums == 3)
        accumulate(column_sums.row(2, blockIdx.x) + column, third, count, first);
    });
  }
  column_sums.template finish<1>();
}

}  // namespace bert_unpad
