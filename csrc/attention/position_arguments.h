// What attention knows of positions, checked: window, query positions, position bias.
#pragma once

#include <algorithm>
#include <optional>

#include "attention/arguments.h"

namespace bert_unpad {

inline AttentionWindow checked_window(int64_t left, int64_t right, const char* op) {
  check(left >= -1 && right >= -1, op,
        ": window must be two numbers of tokens, or -1 for no bound, got (", left, ", ", right,
        ")");
  constexpr int64_t kAll = int64_t{1} << 32;  // reaches from any position to all keys
  return {std::min(left, kAll), std::min(right, kAll)};
}

inline void check_query_positions(const std::optional<Tensor>& positions, const Tensor& q,
                                  const char* op) {
  if (!positions) return;
  check(positions->dim() == 1 && positions->size(0) == q.size(0), op,
        ": query_positions must have shape [", q.size(0), "], one entry a query, got ",
        ShapeOf(*positions));
  check_dtype(*positions, ScalarType::Int, op, "query_positions", "int32");
  check_contiguous(*positions, op, "query_positions");
  check_same_device(*positions, q, op, "query_positions");
}

// The parts of a position bias as they come from Python; see PositionBias in ops/position_bias.py.
struct BiasArguments {
  const std::optional<Tensor>&buckets, &table, &query, &key;
};

// Checks all but the values of the buckets; returns whether there is a bias.
inline bool check_bias(const BiasArguments& bias, const Tensor& q, const Tensor& k, int64_t heads,
                       const char* op) {
  if (!bias.buckets) {
    check(!bias.table && !bias.query && !bias.key, op,
          ": position_bias must have buckets with a table, query or key");
    return false;
  }
  const Tensor& buckets = *bias.buckets;
  check(buckets.dim() == 1 && buckets.size(0) % 2 == 1, op,
        ": bias_buckets must have shape [2 * reach + 1], got ", ShapeOf(buckets));
  check_dtype(buckets, ScalarType::Int, op, "bias_buckets", "int32");
  check_contiguous(buckets, op, "bias_buckets");
  check_same_device(buckets, q, op, "bias_buckets");
  check(bias.table || bias.query || bias.key, op,
        ": position_bias must have a table, query or key");
  int64_t count = -1;  // of buckets
  if (bias.table) {
    const Tensor& table = *bias.table;
    check_shape(table, {-1, heads}, op, "bias_table", "[buckets, heads]");
    count = table.size(0);
    check_dtype(table, ScalarType::Float, op, "bias_table", "float32");
    check_contiguous(table, op, "bias_table");
    check_same_device(table, q, op, "bias_table");
  }
  const auto check_rows = [&](const Tensor& rows, const Tensor& like, const char* name) {
    check_shape(rows, {like.size(0), heads, count}, op, name, "[tokens, heads, buckets]");
    count = rows.size(2);
    check(rows.scalar_type() == q.scalar_type(), op, ": ", name, " must have the input's dtype");
    check_same_device(rows, q, op, name);
    check_last_contiguous(rows, op, name);
  };
  if (bias.query) check_rows(*bias.query, q, "bias_query");
  if (bias.key) check_rows(*bias.key, k, "bias_key");
  return true;
}

// From checked arguments to a device's params; the table is each device's own business.
template <class Bias>
void set_bias_parts(Bias& bias, const BiasArguments& from) {
  bias.reach = static_cast<int>(from.buckets->size(0) / 2);
  bias.bucket = from.buckets->const_data_ptr<int32_t>();
  bias.buckets = static_cast<int>(from.table   ? from.table->size(0)
                                  : from.query ? from.query->size(2)
                                               : from.key->size(2));
  if (from.query) bias.query = packed(*from.query, from.query->stride(0), from.query->stride(1));
  if (from.key) bias.key = packed(*from.key, from.key->stride(0), from.key->stride(1));
}

}  // namespace bert_unpad
