// LN(residual + dropout(x + x_bias)) and its backward pass.
//
// The backward pass makes the LayerNorm's input again from x, residual and the mask drawn again,
// rather than reading a stored copy: the forward pass writes one row less, and that input is never
// rounded to 16 bits.
#include "norm/norm_cuda.h"

#include "cuda/column_sum.h"
#include "cuda/norm_row_launch.h"

namespace bert_unpad::cuda {
namespace {

constexpr const char* kForward = "dropout_add_layer_norm";
constexpr const char* kBackward = "dropout_add_layer_norm_backward";

template <class T>
class AddRow {
  const NormCudaParams& p_;
  int64_t begin_ = 0;  // the row's first element
  float keep_scale_;

 public:
  using Activation = T;
  static constexpr int kSums = 3;
  struct Raw {
    Group<T> x, residual;
  };

  BU_DEVICE explicit AddRow(const NormCudaParams& p)
      : p_(p), keep_scale_(keep_scale(p.norm.keep_threshold)) {}

  BU_DEVICE void begin(int64_t row) { begin_ = row * p_.norm.hidden; }

  BU_DEVICE Parameter input_bias() const { return {p_.x_bias, p_.x_bias_dtype}; }

  template <bool kWide>
  BU_DEVICE Raw load(int column, int count) const {
    Raw raw;
    raw.x = load_group<kWide>(at<const T>(p_.x, column), count);
    if (p_.residual != nullptr)
      raw.residual = load_group<kWide>(at<const T>(p_.residual, column), count);
    return raw;
  }

  template <class Parameters>
  BU_DEVICE void input(const Raw& raw, int column, const Parameters& parameters, uint32_t mask,
                       float (&z)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) z[i] = raw.x[i];
    if (p_.x_bias != nullptr) {
      float bias[kGroup];
      parameters.get(kInputBias, column, bias);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) z[i] += bias[i];
    }
    drop(z, mask, keep_scale_);
    if (p_.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) z[i] += raw.residual[i];
    }
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
  BU_DEVICE void input_gradient(int column, int count, uint32_t mask, float (&dz)[kGroup],
                                float* dx_bias) const {
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
    forward_rows_general<AddRow<T>>(p);
  else
    forward_rows<AddRow<T>, kVectors, kBlockRow>(p);
}

template <class T, int kVectors, bool kBlockRow>
BU_KERNEL((RowBlock<kVectors, kBlockRow>::kThreads), (RowBlock<kVectors, kBlockRow>::kBackward))
layer_norm_backward_kernel(BU_PARAMS NormCudaParams p) {
  if constexpr (kVectors == 0)
    backward_rows_general<AddRow<T>>(p);
  else
    backward_rows<AddRow<T>, kVectors, kBlockRow>(p);
}

bool aligned(const NormCudaParams& p) {
  for (const void* q : {p.x, p.residual, p.norm.dy, static_cast<const void*>(p.y),
                        static_cast<const void*>(p.dx), static_cast<const void*>(p.dresidual)})
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

int64_t dropout_add_layer_norm_partial_rows(const NormCudaParams& p) {
  int64_t rows = 0;
  dispatch(p.norm.dtype,
           [&]<class T>() { rows = row_partial_rows<T>(p.norm, aligned(p), kBackward); });
  return rows;
}

void dropout_add_layer_norm_backward(const NormCudaParams& p, cudaStream_t stream) {
  const RowNormParams& norm = p.norm;
  const int64_t chunks = dropout_add_layer_norm_partial_rows(p);
  if (norm.rows > 0) {
    dispatch(norm.dtype, [&]<class T>() {
      dispatch_row<T>(norm, aligned(p), [&]<int kVectors, bool kBlockRow>() {
        launch_backward_rows<kVectors, kBlockRow>(
            kBackward, layer_norm_backward_kernel<T, kVectors, kBlockRow>, p, stream);
      });
    });
  }
  const int64_t sum = chunks * norm.hidden;
  column_sums(kBackward,
              {{norm.partials, norm.dweight, norm.parameter_dtype},
               {norm.partials + sum, norm.dbias, norm.parameter_dtype},
               {norm.partials + 2 * sum, p.dx_bias, p.x_bias_dtype}},
              chunks, norm.hidden, stream);
}

}  // namespace bert_unpad::cuda
