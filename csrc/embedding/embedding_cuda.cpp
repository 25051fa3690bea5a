// CUDA bindings of embeddings + LayerNorm + dropout: checks, outputs, scratch memory, stream.
#include "embedding/embedding_cuda.h"
#include "common/allocate.h"

#include <limits>
#include <optional>
#include <tuple>

#include "common/philox.h"
#include "cuda/binding.h"
#include "cuda/tickets.h"
#include "embedding/arguments.h"

namespace bert_unpad::cuda {
namespace {

// What forward and backward have in common. `activations` has the dtype of y and [tokens, hidden].
EmbeddingCudaParams common(const EmbeddingTables& tables, const Tensor& activations,
                           const Tensor& weight, double dropout_p, const std::optional<Tensor>& rng,
                           const char* op) {
  check_embedding_arguments(tables, activations, weight, dropout_p, op);
  EmbeddingCudaParams p{};
  p.norm.rows = p.tokens.count = tables[0].ids.numel();
  p.norm.hidden = weight.size(0);
  check_hidden(p.norm.hidden, op);
  p.norm.dtype = storage_dtype(activations, op, "the output");
  p.norm.parameter_dtype = storage_dtype(weight, op, "ln_weight");
  p.norm.keep_threshold = keep_threshold(dropout_p);
  p.norm.rng = rng_pointer(rng, dropout_p, tables[0].rows, op);
  p.norm.weight = weight.const_data_ptr();
  p.table_dtype = storage_dtype(tables[0].rows, op, "word");
  for (int i = 0; i < kTables; ++i) {
    p.tokens.ids[i] = tables[i].ids.const_data_ptr<int64_t>();
    p.tokens.entries[i] = tables[i].rows.size(0);
    p.tables[i] = tables[i].rows.const_data_ptr();
    check(p.tokens.entries[i] < std::numeric_limits<int32_t>::max(), op, ": ", tables[i].rows_name,
          " must have less than 2^31 - 1 entries on a GPU, got ", p.tokens.entries[i]);
  }
  return p;
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor input_ids, Tensor position_ids,
                                           Tensor token_type_ids, Tensor word, Tensor position,
                                           Tensor token_type, Tensor weight, Tensor bias,
                                           double dropout_p, double eps, ScalarType out_dtype,
                                           std::optional<Tensor> rng) {
  const char* op = "embedding_layer_norm";
  const EmbeddingTables tables =
      embedding_tables(input_ids, position_ids, token_type_ids, word, position, token_type);
  check(word.dim() == 2, op, ": word must have shape [entries, hidden], got ", ShapeOf(word));
  const int64_t tokens = input_ids.numel();
  const Call call(word, op);
  Tensor y = allocate(word, {tokens, word.size(1)}, out_dtype);
  EmbeddingCudaParams p = common(tables, y, weight, dropout_p, rng, op);
  check_norm_bias(bias, weight, y, op, "ln_");
  const auto [mean, rstd] = new_statistics(p.norm, word, tokens);
  p.norm.bias = bias.const_data_ptr();
  p.norm.eps = static_cast<float>(eps);
  p.y = y.mutable_data_ptr();
  embedding_layer_norm(p, call.stream);
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor dy, Tensor input_ids, Tensor position_ids, Tensor token_type_ids, Tensor word,
    Tensor position, Tensor token_type, Tensor weight, Tensor mean, Tensor rstd, double dropout_p,
    std::optional<Tensor> rng) {
  const char* op = "embedding_layer_norm_backward";
  const EmbeddingTables tables =
      embedding_tables(input_ids, position_ids, token_type_ids, word, position, token_type);
  const int64_t tokens = input_ids.numel();
  EmbeddingCudaParams p = common(tables, dy, weight, dropout_p, rng, op);
  set_embedding_saved(p.norm, dy, mean, rstd, word, tokens, op);
  const Call call(word, op);
  Tensor gradients[3] = {allocate_like(word), allocate_like(position), allocate_like(token_type)};
  Tensor dweight = allocate_like(weight), dbias = allocate_like(weight);
  for (int i = 0; i < kTables; ++i) p.dtables[i] = gradients[i].mutable_data_ptr();
  p.norm.dweight = dweight.mutable_data_ptr();
  p.norm.dbias = dbias.mutable_data_ptr();
  // Scratch memory; used in stream order, which PyTorch's allocator keeps.
  const int64_t stride = embedding_stride(p.norm.hidden);
  Tensor dz = allocate(word, {tokens, stride}, ScalarType::Float);
  Tensor pieces = allocate(word, {embedding_pieces(tokens), stride}, ScalarType::Float);
  Tensor sort_space = allocate(word, {token_sort_words(p.tokens)}, ScalarType::Int);
  const ColumnScratch scratch = embedding_layer_norm_scratch(p);
  Tensor partials = allocate(word, {2, scratch.rows, p.norm.hidden}, ScalarType::Float);
  p.dz = dz.mutable_data_ptr<float>();
  p.pieces = pieces.mutable_data_ptr<float>();
  p.sort_space = sort_space.mutable_data_ptr<int32_t>();
  p.norm.partials = partials.mutable_data_ptr<float>();
  p.norm.tickets = tickets(op, call.stream, scratch.tickets);
  embedding_layer_norm_backward(p, call.stream);
  return {gradients[0], gradients[1], gradients[2], dweight, dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("embedding_layer_norm", TORCH_BOX(&forward));
  m.impl("embedding_layer_norm_backward", TORCH_BOX(&backward));
}

}  // namespace bert_unpad::cuda
