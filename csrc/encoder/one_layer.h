// A layer of an encoder on a CPU, forward only, within one call of an operator.
//
// Three stages, each a list of tasks: a block of rows up to queries, keys and values; attention of
// all sequences; a block of rows from there to the layer's output. What a block needs stays in the
// second-level cache. Of few rows there is one block, and its products are split by columns.
#pragma once

#include <vector>

#include "attention/attention.h"
#include "common/checks.h"
#include "encoder/products.h"
#include "rotary/rotary.h"

namespace bert_unpad {

// Where the sequences of a call begin, and the positions of tokens; null: none are given.
struct Sequences {
  const int32_t* cu_seqlens;
  int64_t count;
  const Tensor* positions;
};

// The rows of a layer's output, and where each sequence's begin; null: all rows.
struct OutputRows {
  const Tensor* rows;
  const int32_t* cu_rows;
};

struct EncoderNorm {
  const float *weight, *bias;  // null weight: there is none
  float eps;
};

// Rows of x, `hidden` numbers each, normalised; parameters are padded to kRowPadding.
void normalise_rows(bool on_all, const EncoderNorm& norm, bool rms, int64_t hidden, const float* x,
                    float* y, int64_t rows);

class EncoderLayer {
 public:
  static constexpr int kShapes = 9, kNumbers = 6;
  enum { kQuery, kKey, kValue, kOut, kIn, kGate, kLast, kLinears };
  enum { kFirstNorm, kMiddleNorm, kLastNorm, kNorms };
  static constexpr int kParameters = 2 * (int{kLinears} + int{kNorms});

  // `parameters`, `shape` and `numbers` hold kParameters, kShapes and kNumbers.
  EncoderLayer(const char* name, const Tensor& x, const Tensor* parameters, const int64_t* shape,
               const double* numbers);
  // The whole layer.
  Tensor run(const Tensor& x, const Sequences& sequences, const OutputRows& out);

  // Queries, keys and values of all tokens side by side; or queries of these rows of x, which are
  // copied to `copies`, and keys and values of all tokens. In fp32, or rounded.
  struct Projected {
    Tensor q, kv;
  };
  Projected project(const Tensor& x, const Tensor* positions, const Tensor* rows, float* copies,
                    bool in_bf16);
  // From attention's result and the rows of x that it is of to the layer's output. In bf16 the
  // result has 16 rows more, of any value.
  Tensor finish(const Tensor& x, const Tensor& attended_rows);
  void check_attended(const Tensor& t) const {
    check_shape(t, {tokens_, attended()}, op, "attended", "[tokens, heads * head_dim]");
    check_dtype(t, ScalarType::Float, op, "attended", "float32");
    check_contiguous(t, op, "attended");
    check(t.is_cpu(), op, ": attended must be on the CPU like x");
  }

 private:
  const char* op;

  int64_t tokens_, hidden_, heads_, kv_heads_, head_dim_, intermediate_;
  bool gated_, rms_, before_;
  GluKind kind_;
  AttentionWindow window_;
  double scale_, theta_, position_scale_;
  Linear linears_[kLinears] = {};
  EncoderNorm norms_[kNorms] = {};
  std::vector<std::vector<float>> vectors_;                      // padded parameters
  bool any_int8_ = false, any_bf16_ = false, any_fp32_ = false;  // weights
  bool packs_ = false;                                           // in each call
  bool in_bf16_ = false;                                         // attention

  int64_t attended() const { return heads_ * head_dim_; }
  int64_t kv_width() const { return kv_heads_ * head_dim_; }
  int64_t qkv_width() const { return attended() + 2 * kv_width(); }

  const float* vector(const Tensor& t, int64_t n, const char* name) {
    check(t.numel() == 0 || (t.dim() == 1 && t.size(0) == n), op, ": ", name, " must have shape [",
          n, "], got ", ShapeOf(t));
    check_dtype(t, ScalarType::Float, op, name, "float32");
    check_contiguous(t, op, name);
    if (t.numel() > 0 && n % kRowPadding == 0) return t.const_data_ptr<float>();
    vectors_.push_back(t.numel() == 0 ? std::vector<float>(padded_columns(n), 0.0f)
                                      : padded_vector(t, n));
    return vectors_.back().data();
  }

  // The memory of a block of rows.
  struct Block {
    float *normed, *middle, *sum;
    float* inner;  // between the two products of the feed-forward part, in fp32 or bf16
    float* wide;   // what attention takes or gives in bf16
    Int8Rows int8;
    bf16* bf16_rows;
  };
  Block block_memory(int64_t rows) const;
  RowBlocks blocks(int64_t rows) const {
    return {rows, packs_, any_fp32_ ? kBlockRows : kRoundedBlockRows};
  }

  // The rows, rounded too if a linear layer needs that.
  Input input(bool on_all, const float* x, int64_t depth, int64_t rows, const Block& memory) const {
    const Input in{x, depth, rows, memory.int8, memory.bf16_rows};
    round_rows(on_all, in, depth);
    return in;
  }
  void normalise(bool on_all, const EncoderNorm& norm, const float* x, float* y,
                 int64_t rows) const {
    normalise_rows(on_all, norm, rms_, hidden_, x, y, rows);
  }
  void pack_all(int first, int last);

  const float* enter(bool on_all, const float* x, const Block& memory, int64_t rows) const;
  void leave(bool on_all, const Input& attended, const float* x, float* out,
             const Block& memory) const;
  Tensor attend(const Projected& projected, const int32_t* cu_q, const int32_t* cu_k,
                int64_t sequences) const;
  void set_rotary(RotaryCpuParams& p, const Tensor& positions, int64_t stride) const;
};

}  // namespace bert_unpad
