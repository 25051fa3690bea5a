// CPU bindings of embeddings + LayerNorm + dropout: checks, row chunks, table gradients.
#include "embedding/embedding.h"

#include <tuple>

#include "common/allocate.h"
#include "common/checks.h"
#include "cpu/parallel.h"
#include "cpu/rng.h"
#include "cpu/rows.h"
#include "embedding/arguments.h"
#include "embedding/table_gradient_cpu.h"

namespace bert_unpad {

namespace {

void check_ids(const EmbeddingTable& t, const char* op) {
  const auto* ids = t.ids.const_data_ptr<int64_t>();
  const int64_t entries = t.rows.size(0);
  for (int64_t i = 0; i < t.ids.numel(); ++i)
    check(ids[i] >= 0 && ids[i] < entries, op, ": ", t.ids_name, "[", i, "] = ", ids[i],
          " is not in [0, ", entries, "), the entries of ", t.rows_name);
}

// What forward and backward have in common. `activations` has the dtype of y and [tokens, hidden].
void set_common(EmbeddingCpuParams& p, std::vector<float>& weight_vector,
                const EmbeddingTables& tables, const Tensor& activations, const Tensor& weight,
                double dropout_p, const std::optional<Tensor>& rng, const char* op) {
  check_embedding_arguments(tables, activations, weight, dropout_p, op);
  for (const EmbeddingTable& t : tables) check_ids(t, op);
  p.table_dtype = storage_dtype(tables[0].rows, op, "word");
  p.dtype = storage_dtype(activations, op, "the output");
  p.hidden = tables[0].rows.size(1);
  p.padded = padded_columns(p.hidden);
  p.keep_threshold = keep_threshold(dropout_p);
  if (dropout_p > 0.0) p.rng = read_rng(rng, op);
  weight_vector = padded_vector(weight, p.hidden);
  p.weight = weight_vector.data();
  for (int i = 0; i < 3; ++i) {
    p.ids[i] = tables[i].ids.const_data_ptr<int64_t>();
    p.tables[i] = tables[i].rows.const_data_ptr();
  }
}

int64_t scratch_floats(const EmbeddingCpuParams& p) { return 2 * p.padded + word_floats(p.hidden); }

std::tuple<Tensor, Tensor, Tensor> embedding_layer_norm(
    Tensor input_ids, Tensor position_ids, Tensor token_type_ids, Tensor word, Tensor position,
    Tensor token_type, Tensor weight, Tensor bias, double dropout_p, double eps,
    ScalarType out_dtype, std::optional<Tensor> rng) {
  const char* op = "embedding_layer_norm";
  const EmbeddingTables tables =
      embedding_tables(input_ids, position_ids, token_type_ids, word, position, token_type);
  check(word.dim() == 2, op, ": word must have shape [entries, hidden], got ", ShapeOf(word));
  const int64_t tokens = input_ids.numel();
  Tensor y = allocate(word, {tokens, word.size(1)}, out_dtype);
  EmbeddingCpuParams p{};
  std::vector<float> weight_vector, bias_vector;
  set_common(p, weight_vector, tables, y, weight, dropout_p, rng, op);
  check_norm_bias(bias, weight, y, op, "ln_");
  bias_vector = padded_vector(bias, p.hidden);
  p.bias = bias_vector.data();
  p.eps = static_cast<float>(eps);
  const auto [mean, rstd] = new_statistics(p, word, tokens);
  p.y = y.mutable_data_ptr();
  const EmbeddingKernels& kernels = embedding_kernels();
  RowChunks(tokens).for_each([&](int64_t, int64_t begin, int64_t end) {
    kernels.forward(p, begin, end, thread_scratch(scratch_floats(p)));
  });
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> embedding_layer_norm_backward(
    Tensor dy, Tensor input_ids, Tensor position_ids, Tensor token_type_ids, Tensor word,
    Tensor position, Tensor token_type, Tensor weight, Tensor mean, Tensor rstd, double dropout_p,
    std::optional<Tensor> rng) {
  const char* op = "embedding_layer_norm_backward";
  const EmbeddingTables tables =
      embedding_tables(input_ids, position_ids, token_type_ids, word, position, token_type);
  const int64_t tokens = input_ids.numel();
  EmbeddingCpuParams p{};
  std::vector<float> weight_vector;
  set_common(p, weight_vector, tables, dy, weight, dropout_p, rng, op);
  set_embedding_saved(p, dy, mean, rstd, word, tokens, op);

  const RowChunks chunks(tokens);
  const int64_t stride = 2 * p.padded;
  Tensor dz = allocate(dy, {tokens, p.padded}, ScalarType::Float);
  Tensor partials = allocate(dy, {chunks.count * stride}, ScalarType::Float);
  p.dz = dz.mutable_data_ptr<float>();
  auto* sums = partials.mutable_data_ptr<float>();
  const EmbeddingKernels& kernels = embedding_kernels();
  chunks.for_each([&](int64_t chunk, int64_t begin, int64_t end) {
    kernels.backward(p, begin, end, thread_scratch(scratch_floats(p)), sums + chunk * stride);
  });
  Tensor gradients[3] = {allocate_like(word), allocate_like(position), allocate_like(token_type)};
  for (int i = 0; i < 3; ++i)
    scatter_rows(kernels, p.dz, p.padded, TokensById(p.ids[i], tokens, gradients[i].size(0)),
                 p.hidden, p.table_dtype, gradients[i].mutable_data_ptr());
  Tensor dweight = sum_chunks(sums, chunks.count, stride, weight);
  Tensor dbias = sum_chunks(sums + p.padded, chunks.count, stride, weight);
  return {gradients[0], gradients[1], gradients[2], dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("embedding_layer_norm", TORCH_BOX(&embedding_layer_norm));
  m.impl("embedding_layer_norm_backward", TORCH_BOX(&embedding_layer_norm_backward));
}

}  // namespace bert_unpad
