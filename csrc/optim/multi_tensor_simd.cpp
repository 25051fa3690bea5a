// Sum of squares and scaling of a run of elements.
#include "optim/optim.h"
#include "optim/stream_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

// Runs of a few thousand squares are added up in fp32, those in double.
constexpr int64_t kRun = 4096;

template <class T>
double square_sum(const T* x, int64_t size) {
  double sum = 0.0;
  for (int64_t run = 0; run < size; run += kRun) {
    Strip<kStripVectors> squares{};
    const int64_t end = run + kRun < size ? run + kRun : size;
    int64_t j = run;
    for (; j + kStripVectors * kLanes <= end; j += kStripVectors * kLanes) {
      prefetch(x + j);
      const auto v = load_strip(x + j, Whole<kStripVectors>{});
      squares = squares + v * v;
    }
    for (; j < end; j += kLanes) {
      const f32v v = load_n(x + j, end - j < kLanes ? static_cast<int>(end - j) : kLanes);
      squares.v[0] += v * v;
    }
    for (int i = 1; i < kStripVectors; ++i) squares.v[0] += squares.v[i];
    sum += static_cast<double>(reduce_add(squares.v[0]));
  }
  return sum;
}

template <class T>
void scale(T* x, float factor, int64_t size) {
  for_strips(size, [=](int64_t j, auto width) __attribute__((always_inline)) {
    prefetch(x + j);
    store_strip(x + j, load_strip(x + j, width) * factor, width);
  });
}

double run_square_sum(DType dtype, const void* data, int64_t begin, int64_t end) {
  switch (dtype) {
    case DType::kFloat32:
      return square_sum(static_cast<const float*>(data) + begin, end - begin);
    case DType::kBFloat16:
      return square_sum(static_cast<const bf16*>(data) + begin, end - begin);
    default:
      return square_sum(static_cast<const f16*>(data) + begin, end - begin);
  }
}

void run_scale(DType dtype, void* data, float factor, int64_t begin, int64_t end) {
  switch (dtype) {
    case DType::kFloat32:
      return scale(static_cast<float*>(data) + begin, factor, end - begin);
    case DType::kBFloat16:
      return scale(static_cast<bf16*>(data) + begin, factor, end - begin);
    default:
      return scale(static_cast<f16*>(data) + begin, factor, end - begin);
  }
}

}  // namespace

extern const MultiTensorKernels multi_tensor_kernels = {run_square_sum, run_scale};

}  // namespace bert_unpad::BERT_UNPAD_ISA
