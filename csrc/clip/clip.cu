// The norm of a gradient bucket, then one pass that scales and casts it. The host does not wait.
//
// Two kernels. The first leaves one sum of squares per block; in the second every block adds these
// up again, in the same order, and so computes the coefficient itself: at most a few thousand reads
// from the L2 cache, instead of a third kernel or a wait for other blocks.
#include <cmath>

#include "clip/clip_cuda.h"
#include "clip/coefficient.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/vector.h"

namespace bert_unpad::cuda {
namespace {

constexpr const char* kOp = "clip_bucket_";
constexpr int kWarps = 8, kThreads = 32 * kWarps;
// 4 blocks of 256 threads with 4 loads of 16 bytes each keep 64 KiB in flight on an SM, where an
// H100 needs some 20 KiB to hide its memory's latency. Not measured.
constexpr int kBlocks = 4, kInFlight = 4;

constexpr unsigned kBroadcast = sum_over_y_bytes(32, kWarps, 1);  // offset, after sum_over_y's
constexpr unsigned kSharedBytes = kBroadcast + sizeof(float);

BU_DEVICE int thread_number() { return static_cast<int>(threadIdx.y * 32 + threadIdx.x); }

template <class T, int N, bool kResidual>
struct Loaded {
  Vector<T, N> bucket;
  Vector<float, kResidual ? N : 1> residual;
};

template <class T, int N, bool kResidual>
BU_DEVICE Loaded<T, N, kResidual> load(const ClipCudaParams& p, int64_t first) {
  Loaded<T, N, kResidual> in;
  in.bucket = load_vector<T, N>(static_cast<const T*>(p.bucket) + first);
  if constexpr (kResidual) in.residual = load_vector<float, N>(p.residual + first);
  return in;
}

// body(first element, its N or 1 values) for this thread's share of bucket + residual, in vectors
// of N and, at the end of the bucket, single elements.
template <class T, int N, bool kResidual, class Body>
BU_DEVICE void for_share(const ClipCudaParams& p, const Body& body) {
  const int64_t vectors = p.size / N;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + thread_number();
  for (int64_t i = thread; i < vectors; i += step * kInFlight) {
    Loaded<T, N, kResidual> in[kInFlight];
#pragma unroll
    for (int r = 0; r < kInFlight; ++r)
      if (i + r * step < vectors) in[r] = load<T, N, kResidual>(p, (i + r * step) * N);
#pragma unroll
    for (int r = 0; r < kInFlight; ++r) {
      if (i + r * step >= vectors) break;
      float u[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        u[k] = to_float(in[r].bucket.v[k]);
        if constexpr (kResidual) u[k] += in[r].residual.v[k];
      }
      body((i + r * step) * N, u);
    }
  }
  if constexpr (N > 1) {
    const int64_t first = vectors * N + thread;
    if (first < p.size) {
      const auto in = load<T, 1, kResidual>(p, first);
      float u[1] = {to_float(in.bucket.v[0])};
      if constexpr (kResidual) u[0] += in.residual.v[0];
      body(first, u);
    }
  }
}

template <class T, int N, bool kResidual>
BU_KERNEL(kThreads, kBlocks)
clip_norm_kernel(BU_PARAMS ClipCudaParams p) {
  float sum[1] = {0.0f};
  for_share<T, N, kResidual>(p, [&]<int M>(int64_t, const float (&u)[M]) {
#pragma unroll
    for (int k = 0; k < M; ++k) sum[0] += u[k] * u[k];
  });
  sum_over_block(sum, 0);
  if (thread_number() == 0) store_global(p.partials + blockIdx.x, sum[0]);
}

// The same for every thread of every block.
BU_DEVICE float norm_of_partials(const ClipCudaParams& p) {
  float sum[1] = {0.0f};
  for (unsigned i = static_cast<unsigned>(thread_number()); i < gridDim.x; i += kThreads)
    sum[0] += load_global<float>(p.partials + i);
  sum_over_block(sum, 0);
  if (thread_number() == 0) store_shared(kBroadcast, sum[0]);
  sync_block();
  return std::sqrt(load_shared<float>(kBroadcast));
}

template <class T, class Out, int N, bool kResidual>
BU_KERNEL(kThreads, kBlocks)
clip_scale_kernel(BU_PARAMS ClipCudaParams p) {
  const float norm = norm_of_partials(p);
  if (blockIdx.x == 0 && thread_number() == 0) store_global(p.norm, norm);
  float bound = p.max_norm;
  if (p.bound != nullptr) bound *= load_global<float>(p.bound);
  const float scale = clip_scale(norm, bound, p.factor);
  if (scale == 1.0f && p.out == p.bucket) return;
  const float back = 1.0f / p.factor;
  for_share<T, N, kResidual>(p, [&]<int M>(int64_t first, float (&u)[M]) {
#pragma unroll
    for (int k = 0; k < M; ++k) u[k] *= scale;
    store_vector<Out, M>(static_cast<Out*>(p.out) + first, u);
    if constexpr (kResidual) {
      // What was left before is still to be sent: a step that is skipped must not lose it.
      if (!is_finite(scale)) return;
#pragma unroll
      for (int k = 0; k < M; ++k) {
        const float lost = (u[k] - to_float(from_float<Out>(u[k]))) * back;
        u[k] = is_finite(lost) ? lost : 0.0f;  // too large for Out: lost for good
      }
      store_vector<float, M>(p.residual + first, u);
    }
  });
}

// Elements per thread: 16 bytes of the bucket where addresses allow it, else one.
int vector_width(const ClipCudaParams& p) {
  const bool aligned = is_aligned(p.bucket, 16) && is_aligned(p.out, 16) &&
                       (p.residual == nullptr || is_aligned(p.residual, 16));
  return aligned ? 16 / element_size(p.dtype) : 1;
}

template <class T, class Out, bool kResidual>
void launch_both(const ClipCudaParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(clip_blocks(p))), block(32, kWarps);
  const auto both = [&]<int N>() {
    launch(kOp, clip_norm_kernel<T, N, kResidual>, grid, block, kSharedBytes, stream, p);
    launch(kOp, clip_scale_kernel<T, Out, N, kResidual>, grid, block, kSharedBytes, stream, p);
  };
  if (vector_width(p) > 1)
    both.template operator()<kVectorWidth<T>>();
  else
    both.template operator()<1>();
}

}  // namespace

int64_t clip_blocks(const ClipCudaParams& p) {
  const int64_t share = static_cast<int64_t>(kThreads) * kInFlight * vector_width(p);
  return std::clamp<int64_t>((p.size + share - 1) / share, 1,
                             static_cast<int64_t>(sm_count(kOp)) * kBlocks);
}

void clip_bucket(const ClipCudaParams& p, cudaStream_t stream) {
  dispatch(p.dtype, [&]<class T>() {
    if (p.out_dtype == p.dtype) return launch_both<T, T, false>(p, stream);
    if constexpr (sizeof(T) == 2) {
      launch_both<T, float, false>(p, stream);
    } else if (p.out_dtype == DType::kBFloat16) {
      p.residual == nullptr ? launch_both<float, bf16, false>(p, stream)
                            : launch_both<float, bf16, true>(p, stream);
    } else {
      p.residual == nullptr ? launch_both<float, f16, false>(p, stream)
                            : launch_both<float, f16, true>(p, stream);
    }
  });
}

}  // namespace bert_unpad::cuda
