// embedding_layer_norm, and the sort in its backward pass, on the model of a block.
#include "gpu_model/block/c_api.h"
//
#include "embedding/embedding.cu"
#include "embedding/table_gradient.cu"
#include "embedding/token_sort.cu"

using bert_unpad::cuda::EmbeddingCudaParams;

BU_EXPORT int64_t embedding_params_size() { return sizeof(EmbeddingCudaParams); }

BU_EXPORT int embedding_forward(const EmbeddingCudaParams* p) {
  return bert_unpad::block_model::guarded(
      [&] { bert_unpad::cuda::embedding_layer_norm(*p, nullptr); });
}

// Rows of partials and of pieces, 32-bit words for the sort, floats of a row of scratch memory,
// tickets.
BU_EXPORT int embedding_scratch(const EmbeddingCudaParams* p, int64_t* sizes) {
  return bert_unpad::block_model::guarded([&] {
    const auto [rows, tickets] = bert_unpad::cuda::embedding_layer_norm_scratch(*p);
    sizes[0] = rows;
    sizes[1] = bert_unpad::cuda::embedding_pieces(p->norm.rows);
    sizes[2] = bert_unpad::cuda::token_sort_words(p->tokens);
    sizes[3] = bert_unpad::cuda::embedding_stride(p->norm.hidden);
    sizes[4] = tickets;
  });
}

BU_EXPORT int embedding_backward(const EmbeddingCudaParams* p) {
  return bert_unpad::block_model::guarded(
      [&] { bert_unpad::cuda::embedding_layer_norm_backward(*p, nullptr); });
}

// ids and order of one table, sorted, and where each id begins.
BU_EXPORT int embedding_sort(const bert_unpad::cuda::TokenIds* tokens, int64_t table,
                             int32_t* space, int32_t* ids, int32_t* order, int32_t* first) {
  return bert_unpad::block_model::guarded([&] {
    const auto sorted = bert_unpad::cuda::sort_tokens("sort", *tokens, space, nullptr);
    std::copy_n(sorted.ids[table], tokens->count, ids);
    std::copy_n(sorted.order[table], tokens->count, order);
    std::copy_n(sorted.first[table], tokens->entries[table] + 1, first);
  });
}
BU_EXPORT int embedding_sort_words(const bert_unpad::cuda::TokenIds* tokens, int64_t* words) {
  return bert_unpad::block_model::guarded(
      [&] { *words = bert_unpad::cuda::token_sort_words(*tokens); });
}
