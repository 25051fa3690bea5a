// LN(residual + dropout(x + x_bias)) and its backward pass; LN is LayerNorm or RMSNorm.
//
// The backward pass makes the norm's input again from x, residual and the mask drawn again, rather
// than reading a stored copy: the forward pass writes one row less, and that input is never rounded
// to 16 bits. A sum that is a result itself is such a copy: then it is what is normalised, and what
// the backward pass reads.
#include "norm/norm_cuda.h"

#include <algorithm>

#include "cuda/fp8_scaled.h"
#include "cuda/fp8_tile.h"
#include "cuda/norm_row_launch.h"

namespace bert_unpad::cuda {
namespace {

constexpr const char* kForward = "dropout_add_layer_norm";
constexpr const char* kFp8 = "dropout_add_layer_norm_fp8";
constexpr const char* kBackward = "dropout_add_layer_norm_backward";

// kOfSum: a backward pass in which x is the sum; the second operand is then the sum's gradient.
template <class T, bool kOfSum>
class AddRow {
  const NormCudaParams& p_;
  int64_t begin_ = 0;  // the row's first element
  float keep_scale_;

 public:
  using Activation = T;
  static constexpr int kSums = 3;
  struct Raw {
    Group<T> x, second;
  };

  BU_DEVICE explicit AddRow(const NormCudaParams& p)
      : p_(p), keep_scale_(keep_scale(p.norm.keep_threshold)) {}

  BU_DEVICE void begin(int64_t row) { begin_ = row * p_.norm.hidden; }

  BU_DEVICE Parameter input_bias() const { return {p_.x_bias, p_.x_bias_dtype}; }
  BU_DEVICE Result input_bias_gradient() const { return {p_.dx_bias, p_.x_bias_dtype}; }

  template <bool kWide>
  BU_DEVICE Raw load(int column, int count) const {
    Raw raw;
    raw.x = load_group<kWide>(at<const T>(p_.x, column), count);
    if (second() != nullptr) raw.second = load_group<kWide>(at<const T>(second(), column), count);
    return raw;
  }

  BU_DEVICE const void* operand(int i, int64_t row, int column) const {
    const void* base = i == 0 ? p_.x : i == 1 ? second() : p_.norm.dy;
    return base == nullptr ? nullptr : static_cast<const T*>(base) + row * p_.norm.hidden + column;
  }
  template <int kVectors>
  BU_DEVICE Raw take(const NextGroups& next, int i) const {
    Raw raw;
    raw.x = next.take<T>(i);
    if (second() != nullptr) raw.second = next.take<T>(i + kVectors);
    return raw;
  }

  template <class Parameters>
  BU_DEVICE void input(const Raw& raw, int column, const Parameters& parameters, uint32_t mask,
                       float (&z)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) z[i] = raw.x[i];
    if constexpr (kOfSum) return;
    if (p_.x_bias != nullptr) {
      float bias[kGroup];
      parameters.get(kInputBias, column, bias);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) z[i] += bias[i];
    }
    drop(z, mask, keep_scale_);
    if (p_.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) z[i] += raw.second[i];
    }
  }

  template <bool kWide>
  BU_DEVICE void keep_input(int column, int count, float (&z)[kGroup]) const {
    if (p_.sum == nullptr) return;
    store_group<kWide>(at<T>(p_.sum, column), z, count);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) z[i] = to_float(from_float<T>(z[i]));
  }

  template <bool kWide>
  BU_DEVICE void output(int column, int count, uint32_t, const float (&y)[kGroup]) const {
    store_group<kWide>(at<T>(p_.y, column), y, count);
  }

  template <bool kWide>
  BU_DEVICE Group<T> gradient(int column, int count) const {
    return load_group<kWide>(at<const T>(p_.norm.dy, column), count);
  }

  BU_DEVICE void result_gradient(const Group<T>& dy, uint32_t, float (&d)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) d[i] = dy[i];
  }

  template <bool kWide>
  BU_DEVICE void input_gradient(const Raw& raw, int column, int count, uint32_t mask,
                                float (&dz)[kGroup], float* dx_bias) const {
    if (kOfSum && p_.dsum != nullptr) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) dz[i] += raw.second[i];
    }
    if (p_.dresidual != nullptr) store_group<kWide>(at<T>(p_.dresidual, column), dz, count);
    drop(dz, mask, keep_scale_);
    store_group<kWide>(at<T>(p_.dx, column), dz, count);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) dx_bias[i] += dz[i];
  }

 private:
  BU_DEVICE const void* second() const { return kOfSum ? p_.dsum : p_.residual; }

  template <class U, class V>
  BU_DEVICE U* at(V* base, int column) const {
    return static_cast<U*>(base) + begin_ + column;
  }
};

template <class T, int kVectors, bool kBlockRow>
BU_KERNEL((RowBlock<kVectors, kBlockRow>::kThreads),
          (kForwardBlocks<kVectors, kBlockRow, NormCudaParams::kRowOperands>))
layer_norm_kernel(BU_PARAMS NormCudaParams p) {
  if constexpr (kVectors == 0)
    forward_rows_general<AddRow<T, false>>(p);
  else
    forward_rows<AddRow<T, false>, kVectors, kBlockRow>(p);
}

template <class T, bool kOfSum, int kVectors, bool kBlockRow>
BU_KERNEL((BackwardBlock<kVectors, kBlockRow>::kThreads),
          (BackwardBlock<kVectors, kBlockRow>::kBlocks))
layer_norm_backward_kernel(BU_PARAMS NormCudaParams p) {
  if constexpr (kVectors == 0)
    backward_rows_general<AddRow<T, kOfSum>>(p);
  else
    backward_rows<AddRow<T, kOfSum>, kVectors, kBlockRow>(p);
}

// Writes the result in 8 bits too: to the matrix, and for the transposed copy to shared memory.
template <class T>
class AddFp8Row : public AddRow<T, false> {
  const NormFp8Params& p_;
  const float inverse_;
  int64_t begin_ = 0;
  uint32_t shared_row_ = 0;

 public:
  uint32_t shared = 0;  // where the rows of this turn lie
  float largest = 0.0f;

  BU_DEVICE explicit AddFp8Row(const NormFp8Params& p)
      : AddRow<T, false>(p), p_(p), inverse_(1.0f / load_global<float>(p.scale)) {}

  BU_DEVICE void begin(int64_t row) {
    AddRow<T, false>::begin(row);
    begin_ = row * p_.fp8.columns;
    shared_row_ = shared + static_cast<uint32_t>(row % kFp8Multiple * p_.fp8.columns);
  }

  template <bool kWide>
  BU_DEVICE void output(int column, int count, uint32_t mask, const float (&y)[kGroup]) {
    AddRow<T, false>::template output<kWide>(column, count, mask, y);
    Vector<uint32_t, kGroup / 4> words;
#pragma unroll
    for (int word = 0; word < kGroup / 4; ++word) {
      float scaled[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float stored = to_float(from_float<T>(y[4 * word + i]));
        largest = fmaxf(largest, fabsf(stored));
        scaled[i] = fp8::nan_unless_finite(stored) * inverse_;
      }
      words.v[word] = to_fp8_word<E4M3>(scaled);
    }
    store_global(p_.fp8.q + begin_ + column, words);
    if (p_.fp8.q_transposed != nullptr) store_shared(shared_row_ + column, words);
  }
};

// A block takes as many rows in a turn as the transposed copy is padded to: 16 bytes of each of its
// columns. Of two turns the rows lie in two places, so that one barrier is enough.
constexpr uint32_t turn_bytes(int64_t hidden) {
  return static_cast<uint32_t>(kFp8Multiple * hidden);
}

template <class T, int kVectors>
struct Fp8Block {
  static constexpr int kThreads = fp8::kThreads, kWarps = fp8::kWarps;
  // As many warps on an SM as without 8 bits, but for fp32, which would spill.
  static constexpr int kBlocks =
      sizeof(T) == 4 ? 3
                     : kForwardBlocks<kVectors, false, NormCudaParams::kRowOperands> * 4 / kWarps;

  // On Blackwell so many would spill.
  static constexpr int kResident = kBlackwell ? std::max(1, kBlocks - 1) : kBlocks;

  static constexpr uint32_t max_offset(int64_t hidden) {
    return forward_shared_bytes<false>(hidden) + 2 * turn_bytes(hidden);
  }
};

// Rows first, ..., first + 15 of the matrix, which lie at `shared`, become columns of the
// transposed copy; zeros where there is no row.
BU_DEVICE void store_transposed(const Fp8Result& m, int64_t first, uint32_t shared) {
  const int columns = static_cast<int>(m.columns);
  const int64_t count = m.rows - first, padded_rows = fp8_padded(m.rows);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int column = 4 * thread; column < columns; column += 4 * fp8::kThreads) {
    Vector<uint32_t, 4> out[4];
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      uint32_t words[4] = {};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = 4 * group + r;
        if (row < count) words[r] = load_shared<uint32_t>(shared + row * columns + column);
      }
      fp8::transpose_bytes(words);
#pragma unroll
      for (int c = 0; c < 4; ++c) out[c].v[group] = words[c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
      store_global(m.q_transposed + (column + c) * padded_rows + first, out[c]);
  }
}

// The rows of a block, 16 in each turn, of which a warp takes every eighth; see EveryRow.
template <class T>
class Fp8Turns {
  const NormFp8Params& p_;
  AddFp8Row<T>& row_of_;
  int64_t first_;  // of the turn
  uint32_t turn_ = 0;

  BU_DEVICE void begin() {
    row = first_ + threadIdx.y;
    row_of_.shared =
        forward_shared_bytes<false>(p_.norm.hidden) + turn_ * turn_bytes(p_.norm.hidden);
  }

 public:
  int64_t row;

  BU_DEVICE Fp8Turns(const NormFp8Params& p, AddFp8Row<T>& row_of, const RowShare<false>&)
      : p_(p), row_of_(row_of), first_(blockIdx.x * kFp8Multiple) {
    begin();
  }

  BU_DEVICE bool more() const { return first_ < p_.norm.rows; }
  BU_DEVICE bool has_row() const { return row < p_.norm.rows; }
  BU_DEVICE void next() {
    row += fp8::kWarps;
    if (row < first_ + kFp8Multiple) return;
    if (p_.fp8.q_transposed != nullptr) {
      sync_block();
      store_transposed(p_.fp8, first_, row_of_.shared);
    }
    first_ += gridDim.x * kFp8Multiple;
    turn_ ^= 1;
    begin();
  }
};

template <class T, int kVectors>
BU_KERNEL((Fp8Block<T, kVectors>::kThreads), (Fp8Block<T, kVectors>::kResident))
layer_norm_fp8_kernel(BU_PARAMS NormFp8Params p) {
  const auto row_of = forward_rows<AddFp8Row<T>, kVectors, false, Fp8Turns<T>>(p);
  fp8::note_largest(p.largest, row_of.largest, Fp8Block<T, kVectors>::max_offset(p.norm.hidden));
}

bool aligned(const NormCudaParams& p) {
  for (const void* q : {p.x, p.residual, p.norm.dy, p.dsum, static_cast<const void*>(p.y),
                        static_cast<const void*>(p.sum), static_cast<const void*>(p.dx),
                        static_cast<const void*>(p.dresidual)})
    if (!is_aligned(q, 16)) return false;
  return true;
}

}  // namespace

void dropout_add_layer_norm(const NormCudaParams& p, cudaStream_t stream) {
  if (p.norm.rows == 0) return;
  dispatch(p.norm.dtype, [&]<class T>() {
    dispatch_row<T>(p.norm, aligned(p), [&]<int kVectors, bool kBlockRow>() {
      launch_forward_rows<kVectors, kBlockRow>(kForward, layer_norm_kernel<T, kVectors, kBlockRow>,
                                               p, stream);
    });
  });
}

void dropout_add_layer_norm_fp8(const NormFp8Params& p, cudaStream_t stream) {
  const RowNormParams& norm = p.norm;
  if (norm.rows == 0) return;
  dispatch(norm.dtype, [&]<class T>() {
    dispatch_row<T>(norm, aligned(p), [&]<int kVectors, bool kBlockRow>() {
      if constexpr (kBlockRow) {
        dropout_add_layer_norm(p, stream);
        ScaledParams rounding{p.fp8, norm.dtype, false, p.y, p.scale, p.largest};
        quantize_fp8_scaled(kFp8, rounding, stream);
      } else {
        using Block = Fp8Block<T, kVectors>;
        const auto blocks = std::min({fp8_padded(norm.rows) / kFp8Multiple,
                                      int64_t{Block::kBlocks} * sm_count(kFp8), kFp8Largest});
        launch(kFp8, layer_norm_fp8_kernel<T, kVectors>, dim3(static_cast<unsigned>(blocks)),
               dim3(32, Block::kWarps), Block::max_offset(norm.hidden) + fp8::kMaxBytes, stream, p);
      }
    });
  });
}

ColumnScratch dropout_add_layer_norm_scratch(const NormCudaParams& p) {
  ColumnScratch scratch{};
  dispatch(p.norm.dtype,
           [&]<class T>() { scratch = row_scratch<T>(p.norm, aligned(p), kBackward); });
  return scratch;
}

void dropout_add_layer_norm_backward(const NormCudaParams& p, cudaStream_t stream) {
  const RowNormParams& norm = p.norm;
  if (norm.rows == 0) {
    zero_columns(kBackward, norm.dweight, norm.parameter_dtype, norm.hidden, stream);
    zero_columns(kBackward, norm.dbias, norm.parameter_dtype, norm.hidden, stream);
    zero_columns(kBackward, p.dx_bias, p.x_bias_dtype, norm.hidden, stream);
    return;
  }
  dispatch(norm.dtype, [&]<class T>() {
    dispatch_row<T>(norm, aligned(p), [&]<int kVectors, bool kBlockRow>() {
      launch_backward_rows<kVectors, kBlockRow>(
          kBackward,
          p.of_sum ? layer_norm_backward_kernel<T, true, kVectors, kBlockRow>
                   : layer_norm_backward_kernel<T, false, kVectors, kBlockRow>,
          p, stream);
    });
  });
}

}  // namespace bert_unpad::cuda
