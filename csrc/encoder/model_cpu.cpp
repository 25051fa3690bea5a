// A whole encoder on a CPU, forward only: from ids of a padded batch to hidden states or vectors.
#include <algorithm>
#include <cstring>
#include <limits>

#include "common/allocate.h"
#include "cpu/rows.h"
#include "encoder/layers.h"

namespace bert_unpad {

namespace {

constexpr const char* kOp = "encoder_model";
enum { kWord, kPosition, kType, kNormWeight, kNormBias, kFinalWeight, kFinalBias, kEmbeddings };
enum Result : int64_t { kHidden, kMean, kFirst };

// Of a layer's numbers; see schemas.cpp.
bool has_rms(const int64_t* shape) { return shape[5] != 0; }
bool has_window(const int64_t* shape) { return shape[7] >= 0 || shape[8] >= 0; }
bool has_rotary(const double* numbers) { return numbers[4] != 0.0; }

// The cells of ids [B, S] that hold tokens, row after row.
struct Tokens {
  std::vector<int64_t> cells;
  std::vector<int32_t> cu_seqlens{0};

  int64_t count() const { return static_cast<int64_t>(cells.size()); }
};

// What is asked of the mask.
struct Layout {
  bool first, unbroken;  // first columns hold tokens; there is no padding between tokens
};

template <class T>
Tokens find_tokens(const T* mask, int64_t rows, int64_t columns, Layout layout) {
  Tokens found;
  found.cells.reserve(rows * columns);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t cell = row * columns; cell < (row + 1) * columns; ++cell) {
      const bool kept = !mask || mask[cell] == T{1};
      check(kept || mask[cell] == T{0}, kOp, ": mask must hold only 0 (padding) and 1 (token)");
      if (kept) found.cells.push_back(cell);
    }
    const auto first = found.cells.begin() + found.cu_seqlens.back(), end = found.cells.end();
    check(!layout.first || (first != end && *first == row * columns), kOp,
          ": mask: the first position, which the model may read, is padding in row ", row);
    check(!layout.unbroken || first == end || end[-1] - *first == end - first - 1, kOp,
          ": mask: there is padding between tokens, which counts in a window, in row ", row);
    found.cu_seqlens.push_back(static_cast<int32_t>(found.cells.size()));
  }
  return found;
}

Tokens find_tokens(const Tensor& ids, const std::optional<Tensor>& mask, Layout layout) {
  const int64_t rows = ids.size(0), columns = ids.size(1);
  check(rows * columns <= std::numeric_limits<int32_t>::max(), kOp, ": at most 2^31 - 1 tokens");
  if (!mask) return find_tokens<int64_t>(nullptr, rows, columns, layout);
  check_shape(*mask, {rows, columns}, kOp, "mask", "that of ids");
  check_contiguous(*mask, kOp, "mask");
  check(mask->is_cpu(), kOp, ": mask must be on the CPU like ids");
  if (mask->scalar_type() == ScalarType::Bool)
    return find_tokens(mask->const_data_ptr<bool>(), rows, columns, layout);
  check_dtype(*mask, ScalarType::Long, kOp, "mask", "int64 or bool");
  return find_tokens(mask->const_data_ptr<int64_t>(), rows, columns, layout);
}

// A table's rows for all tokens; all take row 0 where there are no ids.
struct Rows {
  const float* table;
  std::vector<int64_t> ids;
};

class Model {
 public:
  Model(const Tensor& ids, const std::optional<Tensor>& token_types,
        const std::vector<Tensor>& embeddings, const std::vector<double>& eps, bool rms,
        const Tokens& tokens)
      : ids_(ids), embeddings_(embeddings), tokens_(tokens), rms_(rms) {
    check(embeddings.size() == kEmbeddings && eps.size() == 2, kOp, ": expected ", int{kEmbeddings},
          " embeddings and 2 eps, got ", embeddings.size(), " and ", eps.size());
    const Tensor& word = embeddings[kWord];
    check(word.dim() == 2 && word.size(1) % kRowPadding == 0 && word.size(1) > 0, kOp,
          ": embeddings[0] must have shape [entries, hidden], a multiple of ", kRowPadding,
          ", got ", ShapeOf(word));
    hidden_ = word.size(1);
    for (int i = 0; i < kEmbeddings; ++i) check_part(i);
    none_.assign(hidden_, 0.0f);
    norms_[0] = norm(kNormWeight, eps[0]);
    norms_[1] = norm(kFinalWeight, eps[1]);
    if (!token_types) return;
    check_shape(*token_types, {ids.size(0), ids.size(1)}, kOp, "token_types", "that of ids");
    check_ids(*token_types, "token_types");
    types_ = token_types->const_data_ptr<int64_t>();
  }

  static void check_ids(const Tensor& t, const char* name) {
    check_dtype(t, ScalarType::Long, kOp, name, "int64");
    check_contiguous(t, kOp, name);
    check(t.is_cpu(), kOp, ": ", name, " must be on the CPU");
  }

  // The position of each token.
  Tensor positions(int64_t first, int64_t padding_id) const {
    Tensor out = allocate(ids_, {tokens_.count()}, ScalarType::Long);
    auto* p = out.mutable_data_ptr<int64_t>();
    const auto* ids = ids_.const_data_ptr<int64_t>();
    const int64_t columns = ids_.size(1);
    int64_t cell = 0, counted = 0;
    for (const int64_t token : tokens_.cells) {
      if (padding_id < 0) {
        *p++ = first + token % columns;
        continue;
      }
      for (; cell <= token; ++cell) {
        if (cell % columns == 0) counted = 0;
        counted += ids[cell] != padding_id;
      }
      *p++ = ids[token] == padding_id ? padding_id : first + counted - 1;
    }
    return out;
  }

  Tensor embed(const Tensor& positions) const {
    const int64_t tokens = tokens_.count();
    const auto* ids = ids_.const_data_ptr<int64_t>();
    const auto* places = positions.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t cell = tokens_.cells[i];
      check_entry(kWord, "ids", ids[cell]);
      check_entry(kPosition, "positions", places[i]);
      if (types_) check_entry(kType, "token_types", types_[cell]);
    }
    Tensor sums = allocate(embeddings_[kWord], {tokens, hidden_});
    auto* out = sums.mutable_data_ptr<float>();
    const float *word = table(kWord), *position = table(kPosition), *type = table(kType);
    RowChunks(tokens).for_each([&](int64_t, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t cell = tokens_.cells[i];
        const float* a = word + ids[cell] * hidden_;
        const float* b = type ? type + (types_ ? types_[cell] : 0) * hidden_ : none_.data();
        const float* c = position ? position + places[i] * hidden_ : none_.data();
        for (int64_t k = 0; k < hidden_; ++k) out[i * hidden_ + k] = a[k] + b[k] + c[k];
      }
    });
    return normalised(sums, norms_[0]);
  }

  Tensor finish(const Tensor& x) const { return normalised(x, norms_[1]); }

  // Hidden states at their cells of [B * S, hidden].
  Tensor padded(const Tensor& x) const {
    const int64_t cells = ids_.numel();
    if (cells == tokens_.count()) return x;
    Tensor out = allocate(x, {cells, hidden_});
    auto* to = out.mutable_data_ptr<float>();
    const auto* from = x.const_data_ptr<float>();
    const size_t bytes = hidden_ * sizeof(float);
    int64_t token = 0;
    for (int64_t cell = 0; cell < cells; ++cell, to += hidden_) {
      const bool kept = token < tokens_.count() && tokens_.cells[token] == cell;
      if (kept)
        std::memcpy(to, from + token++ * hidden_, bytes);
      else
        std::memset(to, 0, bytes);
    }
    return out;
  }

  // The mean of each sequence's rows; zeros for none.
  Tensor means(const Tensor& x) const {
    const int64_t rows = ids_.size(0);
    Tensor out = allocate(x, {rows, hidden_});
    auto* to = out.mutable_data_ptr<float>();
    const auto* from = x.const_data_ptr<float>();
    for (int64_t row = 0; row < rows; ++row, to += hidden_) {
      const int64_t begin = tokens_.cu_seqlens[row], end = tokens_.cu_seqlens[row + 1];
      std::fill(to, to + hidden_, 0.0f);
      for (int64_t i = begin; i < end; ++i)
        for (int64_t k = 0; k < hidden_; ++k) to[k] += from[i * hidden_ + k];
      for (int64_t k = 0; k < hidden_ && end > begin; ++k) to[k] /= static_cast<float>(end - begin);
    }
    return out;
  }

 private:
  const Tensor& ids_;
  const std::vector<Tensor>& embeddings_;
  const Tokens& tokens_;
  const bool rms_;
  int64_t hidden_ = 0;
  const int64_t* types_ = nullptr;
  std::vector<float> none_;
  EncoderNorm norms_[2];

  const float* table(int i) const {
    return embeddings_[i].numel() == 0 ? nullptr : embeddings_[i].const_data_ptr<float>();
  }
  void check_part(int i) const {
    const Tensor& t = embeddings_[i];
    const std::string name = "embeddings[" + std::to_string(i) + "]";
    check_dtype(t, ScalarType::Float, kOp, name.c_str(), "float32");
    check_contiguous(t, kOp, name.c_str());
    check(t.is_cpu(), kOp, ": ", name, " must be on the CPU");
    if (t.numel() == 0 && i != kWord) return;
    check(t.dim() == (i <= kType ? 2 : 1) && t.size(t.dim() - 1) == hidden_, kOp, ": ", name,
          " must have rows of ", hidden_, ", got ", ShapeOf(t));
  }
  void check_entry(int i, const char* name, int64_t id) const {
    const Tensor& t = embeddings_[i];
    check(t.numel() == 0 || (id >= 0 && id < t.size(0)), kOp, ": ", name, ": ", id,
          " is not in [0, ", t.numel() == 0 ? 0 : t.size(0), ")");
  }
  EncoderNorm norm(int i, double eps) const {
    const float* bias = table(i + 1);
    return {table(i), bias ? bias : none_.data(), static_cast<float>(eps)};
  }
  Tensor normalised(const Tensor& x, const EncoderNorm& norm) const {
    if (!norm.weight) return x;
    Tensor y = allocate_like(x);
    normalise_rows(true, norm, rms_, hidden_, x.const_data_ptr<float>(),
                   y.mutable_data_ptr<float>(), x.size(0));
    return y;
  }
};

Tensor encoder_model(Tensor ids, std::optional<Tensor> mask, std::optional<Tensor> token_types,
                     std::vector<Tensor> embeddings, int64_t first_position, int64_t padding_id,
                     std::vector<double> eps, std::vector<Tensor> parameters,
                     std::vector<int64_t> shape, std::vector<double> numbers, int64_t result,
                     bool reads_first) {
  check_shape(ids, {-1, -1}, kOp, "ids", "[rows, columns]");
  Model::check_ids(ids, "ids");
  check(result >= kHidden && result <= kFirst, kOp, ": result must be 0, 1 or 2, got ", result);
  const LayerLists lists{parameters, shape, numbers};
  const size_t layers = lists.count(kOp);
  bool windows = false;
  for (size_t i = 0; i < layers; ++i)
    windows = windows || has_window(&shape[i * EncoderLayer::kShapes]);
  const Tokens tokens = find_tokens(ids, mask, {reads_first || result == kFirst, windows});
  const Model model(ids, token_types, embeddings, eps, layers > 0 && has_rms(shape.data()), tokens);
  const Tensor positions = model.positions(first_position, padding_id);
  Tensor x = model.embed(positions);
  const int64_t rows = ids.size(0);
  const Sequences sequences{tokens.cu_seqlens.data(), rows, &positions};
  // The last layer computes first tokens alone, if nothing there depends on positions.
  const bool first_only = result == kFirst && layers > 0 &&
                          !has_window(&shape[(layers - 1) * EncoderLayer::kShapes]) &&
                          !has_rotary(&numbers[(layers - 1) * EncoderLayer::kNumbers]);
  Tensor firsts = allocate(ids, {rows}, ScalarType::Long);
  std::vector<int32_t> one_each(rows + 1);
  for (int64_t i = 0; i <= rows; ++i) one_each[i] = static_cast<int32_t>(i);
  for (int64_t i = 0; i < rows; ++i) firsts.mutable_data_ptr<int64_t>()[i] = tokens.cu_seqlens[i];
  x = run_layers(kOp, x, lists, sequences,
                 first_only ? OutputRows{&firsts, one_each.data()}
                            : OutputRows{nullptr, tokens.cu_seqlens.data()});
  if (result == kFirst && !first_only) {
    Tensor chosen = allocate(x, {rows, x.size(1)});
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(chosen.mutable_data_ptr<float>() + i * x.size(1),
                  x.const_data_ptr<float>() + tokens.cu_seqlens[i] * x.size(1),
                  x.size(1) * sizeof(float));
    x = chosen;
  }
  x = model.finish(x);
  return result == kHidden ? model.padded(x) : result == kMean ? model.means(x) : x;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("encoder_model", TORCH_BOX(&encoder_model));
}

}  // namespace bert_unpad
