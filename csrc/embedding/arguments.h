// Checks of embedding_layer_norm's arguments, the same on CPU and GPU. The values of the ids are
// checked where they lie: on a CPU by the binding, on a GPU by the kernels.
#pragma once

#include <array>
#include <limits>

#include "common/norm_arguments.h"

namespace bert_unpad {

struct EmbeddingTable {
  const Tensor& ids;
  const Tensor& rows;
  const char* ids_name;
  const char* rows_name;
};

using EmbeddingTables = std::array<EmbeddingTable, 3>;

inline EmbeddingTables embedding_tables(const Tensor& input_ids, const Tensor& position_ids,
                                        const Tensor& token_type_ids, const Tensor& word,
                                        const Tensor& position, const Tensor& token_type) {
  return {{{input_ids, word, "input_ids", "word"},
           {position_ids, position, "position_ids", "position"},
           {token_type_ids, token_type, "token_type_ids", "token_type"}}};
}

// `activations` has the dtype of y and [tokens, hidden].
inline void check_embedding_arguments(const EmbeddingTables& tables, const Tensor& activations,
                                      const Tensor& weight, double dropout_p, const char* op) {
  const EmbeddingTable& word = tables[0];
  check(word.rows.dim() == 2, op, ": word must have shape [entries, hidden], got ",
        ShapeOf(word.rows));
  const DType table_dtype = storage_dtype(word.rows, op, "word");
  const DType dtype = storage_dtype(activations, op, "the output");
  for (const EmbeddingTable& t : tables) {
    check_dtype(t.ids, ScalarType::Long, op, t.ids_name, "int64");
    check_shape(t.ids, {word.ids.numel()}, op, t.ids_name, "[tokens]");
    check_contiguous(t.ids, op, t.ids_name);
    check_same_device(t.ids, word.rows, op, t.ids_name);
    check(t.rows.dim() == 2 && t.rows.size(1) == word.rows.size(1) && t.rows.size(1) >= 1, op, ": ",
          t.rows_name, " must have shape [entries, hidden], hidden as in word, got ",
          ShapeOf(t.rows));
    check(t.rows.scalar_type() == word.rows.scalar_type(), op, ": ", t.rows_name,
          " must have the dtype of word");
    check_contiguous(t.rows, op, t.rows_name);
    check_same_device(t.rows, word.rows, op, t.rows_name);
  }
  check(word.ids.numel() <= std::numeric_limits<int32_t>::max(), op,
        ": at most 2^31 - 1 tokens, got ", word.ids.numel());
  check(table_dtype == DType::kFloat32 || table_dtype == dtype, op,
        ": word must be float32 or of the output's dtype");
  check_parameter(weight, word.rows.size(1), activations, op, "ln_weight");
  check_probability(dropout_p, op, "dropout_p");
}

// dy and the statistics of the forward pass; `p` is a params struct with pointers to them.
template <class Params>
void set_embedding_saved(Params& p, const Tensor& dy, const Tensor& mean, const Tensor& rstd,
                         const Tensor& word, int64_t tokens, const char* op) {
  check_shape(dy, {tokens, word.size(1)}, op, "dy", "[tokens, hidden]");
  check_contiguous(dy, op, "dy");
  check_same_device(dy, word, op, "dy");
  p.dy = dy.const_data_ptr();
  set_statistics(p, mean, rstd, tokens, word, op);
}

}  // namespace bert_unpad
