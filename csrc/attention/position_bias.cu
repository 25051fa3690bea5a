// Before and after attention's kernels with a position bias: buckets are checked and the table is
// spread out by distance, so that a score takes one load; then sums of gradients by query, key and
// bucket become gradients, the table's in two stages and a fixed order.
#include "attention/launch.h"
#include "cuda/column_sum.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/vector.h"

namespace bert_unpad::cuda {
namespace {

constexpr int kBiasThreads = 256;
constexpr int kBiasCastWidth = 4;                     // elements of a thread
constexpr int kBiasColumns = 32, kBiasRowLanes = 16;  // of a block that sums columns

unsigned bias_blocks(int64_t blocks) {
  if (blocks > INT32_MAX)
    throw std::runtime_error(std::string(kBackwardOp) +
                             ": too many tokens, heads and buckets for one launch");
  return static_cast<unsigned>(blocks);
}

struct BiasDistancesParams {
  AttentionCudaBias bias;
  int heads;
};

// A block has distances of one head.
BU_KERNEL(kBiasThreads, 2) attention_bias_distances_kernel(BU_PARAMS BiasDistancesParams p) {
  const int64_t distances = 2 * int64_t{p.bias.reach} + 1;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kBiasThreads + threadIdx.x;
  if (at >= distances) return;
  const int bucket = load_global<int32_t>(p.bias.bucket + at);
  BU_REQUIRE(bucket >= 0 && bucket < p.bias.buckets,
             "bias_buckets must be at least 0 and below the number of buckets");
  if (p.bias.table == nullptr) return;
  const int64_t head = blockIdx.y;
  store_global<float>(p.bias.distances + head * distances + at,
                      load_global<float>(p.bias.table + int64_t{bucket} * p.heads + head));
}

struct BiasCastParams {
  const float* from;
  void* to;
  int64_t count;
};

template <class T>
BU_KERNEL(kBiasThreads, 2)
attention_bias_cast_kernel(BU_PARAMS BiasCastParams p) {
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kBiasThreads + threadIdx.x) * kBiasCastWidth;
  T* to = static_cast<T*>(p.to);
  if (first + kBiasCastWidth <= p.count) {
    const auto x = load_vector<float, kBiasCastWidth>(p.from + first);
    store_vector<T, kBiasCastWidth>(to + first, x.v);
  } else {
    for (int64_t i = first; i < p.count; ++i)
      store_global<T>(to + i, from_float<T>(load_global<float>(p.from + i)));
  }
}

void cast_bias_sums(const AttentionCudaParams& args, const AttentionCudaBias& bias,
                    const float* sums, void* out, int64_t tokens, cudaStream_t stream) {
  const int64_t count = tokens * args.heads * bias.buckets;
  if (out == nullptr || out == sums || count == 0) return;
  const dim3 grid(bias_blocks((count - 1) / (kBiasThreads * kBiasCastWidth) + 1));
  const auto kernel = args.dtype == DType::kBFloat16 ? attention_bias_cast_kernel<bf16>
                                                     : attention_bias_cast_kernel<f16>;
  launch(kBackwardOp, kernel, grid, dim3(kBiasThreads), 0, stream,
         BiasCastParams{sums, out, count});
}

struct BiasTableParams {
  const float* sums;
  float* parts;
  int64_t tokens;
  int heads, buckets;
};

// A block sums kBiasColumns columns, (head, bucket), of kBiasPartRows rows, and turns them round to
// (bucket, head).
BU_KERNEL(kBiasColumns* kBiasRowLanes, 2) attention_bias_table_kernel(BU_PARAMS BiasTableParams p) {
  const int64_t columns = static_cast<int64_t>(p.heads) * p.buckets;
  const int64_t strips = (columns + kBiasColumns - 1) / kBiasColumns;
  const int64_t part = blockIdx.x / strips;
  const int64_t column = blockIdx.x % strips * kBiasColumns + threadIdx.x;
  const int64_t first = part * kBiasPartRows;
  const int64_t end = first + kBiasPartRows < p.tokens ? first + kBiasPartRows : p.tokens;
  float sum[1] = {0.0f};
  if (column < columns) {
    for (int64_t row = first + threadIdx.y; row < end; row += kBiasRowLanes)
      sum[0] += load_global<float>(p.sums + row * columns + column);
  }
  sum_over_y(sum, 0);
  if (threadIdx.y > 0 || column >= columns) return;
  const int64_t head = column / p.buckets, bucket = column % p.buckets;
  store_global<float>(p.parts + part * columns + bucket * p.heads + head, sum[0]);
}

}  // namespace

void prepare_bias(const char* op, const AttentionCudaParams& args, const AttentionCudaBias& bias,
                  cudaStream_t stream) {
  const int heads = bias.table == nullptr ? 1 : args.heads;
  if (heads == 0) return;
  const dim3 grid(static_cast<unsigned>(2 * int64_t{bias.reach} / kBiasThreads + 1),
                  static_cast<unsigned>(heads));
  launch(op, attention_bias_distances_kernel, grid, dim3(kBiasThreads), 0, stream,
         BiasDistancesParams{bias, args.heads});
}

void finish_bias(const AttentionCudaParams& args, const AttentionCudaBias& bias,
                 cudaStream_t stream) {
  cast_bias_sums(args, bias, bias.dquery_sums, bias.dquery, args.q_tokens, stream);
  cast_bias_sums(args, bias, bias.dkey_sums, bias.dkey, args.k_tokens, stream);
  const int64_t columns = static_cast<int64_t>(args.heads) * bias.buckets;
  if (bias.dtable == nullptr || columns == 0) return;
  const int64_t parts = bias_parts(args.q_tokens);
  if (parts > 0)
    launch(kBackwardOp, attention_bias_table_kernel,
           dim3(bias_blocks((columns + kBiasColumns - 1) / kBiasColumns * parts)),
           dim3(kBiasColumns, kBiasRowLanes), sum_over_y_bytes(kBiasColumns, kBiasRowLanes, 1),
           stream,
           BiasTableParams{bias.dquery_sums, bias.dtable_parts, args.q_tokens, args.heads,
                           bias.buckets});
  column_sum(kBackwardOp, bias.dtable_parts, DType::kFloat32, parts, columns, bias.dtable,
             DType::kFloat32, stream);
}

}  // namespace bert_unpad::cuda
