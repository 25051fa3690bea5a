// Softmax cross-entropy of masked tokens, limited by memory: the forward pass reads every logit
// once, the backward pass reads it once more and writes its gradient.
//
// A block takes a row. In the forward pass each thread keeps a running maximum and sum of its
// columns (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), rescaled
// once a vector; the threads' pairs are joined once a row. Whether the prediction
// is right needs no search for the largest logit: the label's own is read first, and it is the
// largest if it equals the maximum and no earlier column does. Rows' losses are added up by a
// second kernel, in an order that does not depend on when blocks finish.
//
// A row may begin at any address: before its first multiple of 16 bytes, and after its last one,
// columns are taken one by one. Columns are counted in 32 bits; the binding sees to it that these
// suffice, with room for what a block takes at once.
#include <algorithm>
#include <cmath>

#include "cuda/launch.h"
#include "cuda/math.h"
#include "cuda/reduce.h"
#include "cuda/vector.h"
#include "loss/loss_cuda.h"

namespace bert_unpad::cuda {
namespace {

constexpr const char* kForward = "masked_cross_entropy";
constexpr const char* kBackward = "masked_cross_entropy_backward";
constexpr float kLog2e = 1.44269504f;

// Threads of a row's block at most, blocks on an SM at least, and vectors that a thread has in
// flight. Not measured: 4 x 256 threads with 4 x 16 bytes keep up to 64 KiB of loads in flight on
// an SM, where an H100 needs some 20 KiB to hide its memory's latency.
constexpr int kThreads = 256, kBlocks = 4, kVectors = 4;
constexpr int kSumThreads = 1024;

// A row's columns: `head` single ones, then vectors of N, then single ones from `tail` on.
template <class T, int N>
struct Columns {
  int count, head, vectors, tail;

  BU_DEVICE Columns(const T* row, int count) : count(count), head(0) {
    if constexpr (N > 1) {
      const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16);
      head = std::min(count, (16 - past) % 16 / static_cast<int>(sizeof(T)));
    }
    vectors = (count - head) / N;
    tail = head + vectors * N;
  }

  // The one column that this thread takes by itself; -1 if none. There are fewer than 32.
  BU_DEVICE int single() const {
    const int t = threadIdx.x;
    if (t < head) return t;
    return t - head < count - tail ? tail + (t - head) : -1;
  }

  // Of vector `v`.
  BU_DEVICE int first(int v) const { return head + v * N; }
};

BU_DEVICE float finite_base(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// Of some of a row's columns.
struct alignas(16) Part {
  float maximum;
  float sum;      // of exp(x - finite_base(maximum))
  float earlier;  // 1 if a column before the label equals the label's logit, else 0
  float unused;
};

struct Label {
  int column;
  float logit;
};

// N neighbouring columns, the first of them `column`.
template <int N>
BU_DEVICE void add(Part& part, const float (&x)[N], int column, const Label& label) {
  float top = x[0];
#pragma unroll
  for (int i = 1; i < N; ++i) top = fmaxf(top, x[i]);
  if (top == label.logit) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (x[i] == label.logit && column + i < label.column) part.earlier = 1.0f;
  }
  const float maximum = fmaxf(part.maximum, top), base = finite_base(maximum);
  part.sum *= exp2_approx((part.maximum - base) * kLog2e);
  part.maximum = maximum;
#pragma unroll
  for (int i = 0; i < N; ++i) part.sum += exp2_approx((x[i] - base) * kLog2e);
}

// The same of all lanes' columns, in all lanes.
BU_DEVICE Part join_warp(const Part& part) {
  Part all{};
  all.maximum = warp_max(part.maximum);
  all.sum = warp_sum(part.sum * exp2_approx((part.maximum - finite_base(all.maximum)) * kLog2e));
  all.earlier = warp_max(part.earlier);
  return all;
}

// f(column, x) for this thread's columns of a row, x being one or N neighbouring logits in fp32;
// N = 1 where vectors would not be aligned. Loads of kVectors vectors are started together.
template <int N, class T, class F>
BU_DEVICE void for_columns(const T* row, int count, const F& f) {
  const Columns<T, N> columns(row, count);
  const int threads = blockDim.x;
  for (int v = threadIdx.x; v < columns.vectors; v += threads * kVectors) {
    Vector<T, N> in[kVectors];
#pragma unroll
    for (int r = 0; r < kVectors; ++r)
      if (v + r * threads < columns.vectors)
        in[r] = load_vector<T, N>(row + columns.first(v + r * threads));
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      if (v + r * threads >= columns.vectors) break;
      float x[N];
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = to_float(in[r].v[i]);
      f(columns.first(v + r * threads), x);
    }
  }
  const int single = columns.single();
  if (single >= 0) {
    float x[1] = {to_float(load_global<T>(row + single))};
    f(single, x);
  }
}

BU_DEVICE int column_of(const LossCudaParams& p, int64_t label) {
  BU_REQUIRE(label >= 0 && label < p.vocab,
             "masked_cross_entropy: a label is neither ignore_index nor in [0, vocab_size)");
  return static_cast<int>(label);
}

template <class T>
BU_KERNEL(kThreads, kBlocks)
masked_cross_entropy_kernel(BU_PARAMS LossCudaParams p) {
  const int64_t row = blockIdx.x;
  const auto label = load_global<int64_t>(p.labels + row);
  if (label == p.ignore_index) {
    if (threadIdx.x == 0) {
      store_global(p.lse + row, 0.0f);
      store_global(p.row_losses + row, RowLoss{0.0f, 0});
    }
    return;
  }
  const T* logits = static_cast<const T*>(p.logits) + row * p.columns;
  const int column_of_label = column_of(p, label);
  const float logit = to_float(load_global<T>(logits + column_of_label));
  Part part{-INFINITY, 0.0f, 0.0f, 0.0f};
  for_columns<kVectorWidth<T>>(logits, p.vocab, [&](int column, const auto& x) {
    add(part, x, column, Label{column_of_label, logit});
  });
  part = join_warp(part);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) store_shared(warp * sizeof(Part), part);
  sync_block();
  if (warp > 0) return;
  part = Part{-INFINITY, 0.0f, 0.0f, 0.0f};
  if (lane < blockDim.x / 32) part = load_shared<Part>(lane * sizeof(Part));
  part = join_warp(part);
  if (lane > 0) return;
  const float base = finite_base(part.maximum), log_sum = logf(part.sum);
  store_global(p.lse + row, base + log_sum);
  const bool correct = logit == part.maximum && part.earlier == 0.0f;
  store_global(p.row_losses + row, RowLoss{log_sum + (base - logit), correct});
}

// Adds up the rows' losses, in double as the CPU does: there may be many. One block.
struct alignas(16) Sums {
  double loss;
  uint32_t correct, unused;
};

BU_KERNEL(kSumThreads, 1) sum_losses_kernel(BU_PARAMS LossCudaParams p) {
  Sums sums{};
  for (uint32_t row = threadIdx.x; row < p.rows; row += kSumThreads) {
    const auto one = load_global<RowLoss>(p.row_losses + row);
    sums.loss += one.loss;
    sums.correct += one.correct;
  }
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  sums.loss = warp_sum(sums.loss);
  sums.correct = warp_sum(sums.correct);
  if (lane == 0) store_shared(warp * sizeof(Sums), sums);
  sync_block();
  if (warp > 0) return;
  sums = load_shared<Sums>(lane * sizeof(Sums));
  const double loss = warp_sum(sums.loss);
  const uint32_t correct = warp_sum(sums.correct);
  if (lane > 0) return;
  store_global(p.loss_sum, static_cast<float>(loss));
  store_global(p.correct, static_cast<int64_t>(correct));
}

// N neighbouring columns' logits become gradients.
template <int N>
BU_DEVICE void differentiate(float (&x)[N], int column, int vocab, int label, float lse,
                             float dloss) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = exp2_approx((x[i] - lse) * kLog2e);
  if (label >= column && label < column + N) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (label == column + i) x[i] -= 1.0f;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] *= dloss;
  if (column + N > vocab) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (column + i >= vocab) x[i] = 0.0f;
  }
}

template <class T, int N>
BU_DEVICE void store_zeros(T* row, int count) {
  const Columns<T, N> columns(row, count);
  const float zeros[N] = {};
  for (int v = threadIdx.x; v < columns.vectors; v += blockDim.x)
    store_vector<T, N>(row + columns.first(v), zeros);
  const int single = columns.single();
  if (single >= 0) store_global(row + single, from_float<T>(0.0f));
}

// A thread writes where it has read, so that the gradient may overwrite the logits.
template <class T, int N>
BU_KERNEL(kThreads, kBlocks)
masked_cross_entropy_backward_kernel(BU_PARAMS LossCudaParams p) {
  const int64_t row = blockIdx.x;
  const auto label = load_global<int64_t>(p.labels + row);
  T* dx = static_cast<T*>(p.dlogits) + row * p.columns;
  if (label == p.ignore_index) {
    store_zeros<T, N>(dx, p.columns);
    return;
  }
  const int column_of_label = column_of(p, label);
  const T* x = static_cast<const T*>(p.logits) + row * p.columns;
  const float lse = load_global<float>(p.lse + row), dloss = load_global<float>(p.dloss);
  for_columns<N>(x, p.columns, [&]<int M>(int column, float (&out)[M]) {
    differentiate(out, column, p.vocab, column_of_label, lse, dloss);
    store_vector<T, M>(dx + column, out);
  });
}

// Enough warps for a row of n elements.
unsigned threads_of(int64_t n, DType dtype) {
  const int64_t vectors = n * element_size(dtype) / 16;
  return static_cast<unsigned>(std::clamp<int64_t>((vectors + 31) / 32 * 32, 32, kThreads));
}

dim3 grid_of(const LossCudaParams& p) { return dim3(static_cast<unsigned>(p.rows)); }

}  // namespace

void masked_cross_entropy(const LossCudaParams& p, cudaStream_t stream) {
  if (p.rows > 0) {
    const unsigned threads = threads_of(p.vocab, p.dtype);
    dispatch(p.dtype, [&]<class T>() {
      launch(kForward, masked_cross_entropy_kernel<T>, grid_of(p), dim3(threads),
             threads / 32 * sizeof(Part), stream, p);
    });
  }
  launch(kForward, sum_losses_kernel, dim3(1), dim3(kSumThreads), kSumThreads / 32 * sizeof(Sums),
         stream, p);
}

void masked_cross_entropy_backward(const LossCudaParams& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  const dim3 threads(threads_of(p.columns, p.dtype));
  const auto between =
      reinterpret_cast<uintptr_t>(p.logits) - reinterpret_cast<uintptr_t>(p.dlogits);
  dispatch(p.dtype, [&]<class T>() {
    // Vectors where a row's logits and gradients reach a multiple of 16 bytes together.
    const auto kernel = between % 16 == 0 ? masked_cross_entropy_backward_kernel<T, kVectorWidth<T>>
                                          : masked_cross_entropy_backward_kernel<T, 1>;
    launch(kBackward, kernel, grid_of(p), threads, 0, stream, p);
  });
}

}  // namespace bert_unpad::cuda
