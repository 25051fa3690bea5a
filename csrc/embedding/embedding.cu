// dropout(LN(word + position + token type)) and its backward pass.
//
// The backward pass gathers the rows again instead of storing the LayerNorm's input. It writes the
// gradient of that input in fp32; the tables' gradients are sums of its rows.
#include "cuda/norm_row_launch.h"
#include "embedding/embedding_cuda.h"
#include "embedding/table_gradient.h"
#include "embedding/token_ids.h"

namespace bert_unpad::cuda {
namespace {

constexpr const char* kEmbedding = "embedding_layer_norm";
constexpr const char* kEmbeddingBackward = "embedding_layer_norm_backward";

// T: activations, P: tables.
template <class T, class P>
class EmbeddingRow {
  const EmbeddingCudaParams& p_;
  int64_t token_ = 0;
  const P* rows_[kTables] = {};
  float keep_scale_;

 public:
  using Activation = T;
  static constexpr int kSums = 2;
  struct Raw {
    Group<P> rows[kTables];
  };

  BU_DEVICE explicit EmbeddingRow(const EmbeddingCudaParams& p)
      : p_(p), keep_scale_(keep_scale(p.norm.keep_threshold)) {}

  BU_DEVICE void begin(int64_t token) {
    token_ = token;
#pragma unroll
    for (int t = 0; t < kTables; ++t)
      rows_[t] =
          static_cast<const P*>(p_.tables[t]) + token_id(p_.tokens, t, token) * p_.norm.hidden;
  }

  BU_DEVICE Parameter input_bias() const { return {nullptr, DType::kFloat32}; }

  template <bool kWide>
  BU_DEVICE Raw load(int column, int count) const {
    Raw raw;
#pragma unroll
    for (int t = 0; t < kTables; ++t) raw.rows[t] = load_group<kWide>(rows_[t] + column, count);
    return raw;
  }

  template <class Parameters>
  BU_DEVICE void input(const Raw& raw, int, const Parameters&, uint32_t, float (&z)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) z[i] = raw.rows[0][i] + raw.rows[1][i] + raw.rows[2][i];
  }

  template <bool kWide>
  BU_DEVICE void keep_input(int, int, float (&)[kGroup]) const {}

  template <bool kWide>
  BU_DEVICE void output(int column, int count, uint32_t mask, float (&y)[kGroup]) const {
    drop(y, mask, keep_scale_);
    store_group<kWide>(static_cast<T*>(p_.y) + token_ * p_.norm.hidden + column, y, count);
  }

  template <bool kWide>
  BU_DEVICE Group<T> gradient(int column, int count) const {
    return load_group<kWide>(static_cast<const T*>(p_.norm.dy) + token_ * p_.norm.hidden + column,
                             count);
  }

  BU_DEVICE void result_gradient(const Group<T>& dy, uint32_t mask, float (&d)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) d[i] = dy[i];
    drop(d, mask, keep_scale_);
  }

  template <bool kWide>
  BU_DEVICE void input_gradient(const Raw&, int column, int count, uint32_t,
                                const float (&dz)[kGroup], float*) const {
    store_group<kWide>(p_.dz + token_ * embedding_stride(p_.norm.hidden) + column, dz, count);
  }
};

template <class T, class P, int kVectors, bool kBlockRow>
BU_KERNEL((RowBlock<kVectors, kBlockRow>::kThreads),
          (kForwardBlocks<kVectors, kBlockRow, EmbeddingCudaParams::kRowOperands>))
embedding_kernel(BU_PARAMS EmbeddingCudaParams p) {
  if constexpr (kVectors == 0)
    forward_rows_general<EmbeddingRow<T, P>>(p);
  else
    forward_rows<EmbeddingRow<T, P>, kVectors, kBlockRow>(p);
}

template <class T, class P, int kVectors, bool kBlockRow>
BU_KERNEL((BackwardBlock<kVectors, kBlockRow>::kThreads),
          (BackwardBlock<kVectors, kBlockRow>::kBlocks))
embedding_backward_kernel(BU_PARAMS EmbeddingCudaParams p) {
  if constexpr (kVectors == 0)
    backward_rows_general<EmbeddingRow<T, P>>(p);
  else
    backward_rows<EmbeddingRow<T, P>, kVectors, kBlockRow>(p);
}

bool aligned(const EmbeddingCudaParams& p) {
  bool all = is_aligned(p.y, 16) && is_aligned(p.norm.dy, 16);
  for (const void* table : p.tables) all = all && is_aligned(table, 16);
  return all;
}

// f.operator()<activation type, table type>()
template <class F>
void dispatch_dtypes(const EmbeddingCudaParams& p, const F& f) {
  dispatch(p.norm.dtype, [&]<class T>() {
    p.table_dtype == DType::kFloat32 ? f.template operator()<T, float>()
                                     : f.template operator()<T, T>();
  });
}

}  // namespace

int64_t embedding_pieces(int64_t tokens) { return table_gradient_pieces(tokens); }

void embedding_layer_norm(const EmbeddingCudaParams& p, cudaStream_t stream) {
  if (p.norm.rows == 0) return;
  dispatch_dtypes(p, [&]<class T, class P>() {
    dispatch_row<P>(p.norm, aligned(p), [&]<int kVectors, bool kBlockRow>() {
      launch_forward_rows<kVectors, kBlockRow>(
          kEmbedding, embedding_kernel<T, P, kVectors, kBlockRow>, p, stream);
    });
  });
}

ColumnScratch embedding_layer_norm_scratch(const EmbeddingCudaParams& p) {
  ColumnScratch scratch{};
  dispatch_dtypes(p, [&]<class T, class P>() {
    scratch = row_scratch<P>(p.norm, aligned(p), kEmbeddingBackward);
  });
  return scratch;
}

void embedding_layer_norm_backward(const EmbeddingCudaParams& p, cudaStream_t stream) {
  const RowNormParams& norm = p.norm;
  if (norm.rows == 0) {
    zero_columns(kEmbeddingBackward, norm.dweight, norm.parameter_dtype, norm.hidden, stream);
    zero_columns(kEmbeddingBackward, norm.dbias, norm.parameter_dtype, norm.hidden, stream);
  } else {
    dispatch_dtypes(p, [&]<class T, class P>() {
      dispatch_row<P>(norm, aligned(p), [&]<int kVectors, bool kBlockRow>() {
        launch_backward_rows<kVectors, kBlockRow>(
            kEmbeddingBackward, embedding_backward_kernel<T, P, kVectors, kBlockRow>, p, stream);
      });
    });
  }
  TableGradientParams tables{};
  tables.sorted = sort_tokens(kEmbeddingBackward, p.tokens, p.sort_space, stream);
  tables.tokens = norm.rows;
  tables.hidden = norm.hidden;
  tables.stride = embedding_stride(norm.hidden);
  tables.dz = p.dz;
  tables.pieces = p.pieces;
  tables.dtype = p.table_dtype;
  for (int t = 0; t < kTables; ++t) {
    tables.entries[t] = p.tokens.entries[t];
    tables.tables[t] = p.dtables[t];
  }
  table_gradients(kEmbeddingBackward, tables, stream);
}

}  // namespace bert_unpad::cuda
