// LN(residual + dropout(x + x_bias)) and its backward pass; LN is LayerNorm or RMSNorm.
//
// The backward pass makes the norm's input again from x, residual and the mask drawn again, rather
// than reading a stored copy: the forward pass writes one row less, and that input is never rounded
// to 16 bits. A sum that is a result itself is such a copy: then it is what is normalised, and what
// the backward pass reads.
#include "norm/norm_cuda.h"

#include "cuda/norm_row_launch.h"

namespace bert_unpad::cuda {
namespace {

constexpr const char* kForward = "dropout_add_layer_norm";
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
    const void* second = kOfSum ? p_.dsum : p_.residual;
    if (second != nullptr) raw.second = load_group<kWide>(at<const T>(second, column), count);
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
