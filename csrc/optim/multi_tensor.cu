// Norms and scaling of a list of tensors: a block a chunk, then a block a tensor.
#include "cuda/launch.h"
#include "cuda/vector.h"
#include "optim/chunk_sums.h"
#include "optim/optim_cuda.h"

namespace bert_unpad::cuda {
namespace {

constexpr const char* kNorm = "multi_tensor_l2norm";
constexpr const char* kScale = "multi_tensor_scale_";

struct PlainEntry {
  void* data;
  int64_t size;
  int number;  // of its first chunk in the whole list
  int aligned;
};

struct PlainParams {
  Table<PlainEntry> table;
  float* partials;
  const float* factor;
};

template <class T>
BU_KERNEL(kBlockThreads, 4)
square_sum_kernel(BU_PARAMS PlainParams p) {
  const Place at = place_of(p.table, static_cast<int>(blockIdx.x));
  const PlainEntry& entry = p.table.entries[at.entry];
  const T* x = static_cast<const T*>(entry.data);
  float sum[1] = {0.0f};
  for_elements<kVectorWidth<T>>(at, entry.aligned, [&]<int N>(int64_t j) {
    const Vector<T, N> in = load_vector<T, N>(x + j);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[0] += to_float(in.v[i]) * to_float(in.v[i]);
  });
  sum_over_block(sum, 0);
  if (threadIdx.y == 0 && threadIdx.x == 0) {
    const int64_t chunk = entry.number + at.begin / kBlockElements;
    store_global(p.partials + chunk, sum[0]);
  }
}

template <class T>
BU_KERNEL(kBlockThreads, 4)
scale_kernel(BU_PARAMS PlainParams p) {
  const Place at = place_of(p.table, static_cast<int>(blockIdx.x));
  const PlainEntry& entry = p.table.entries[at.entry];
  T* x = static_cast<T*>(entry.data);
  const float factor = load_global<float>(p.factor);
  for_elements<kVectorWidth<T>>(at, entry.aligned, [&]<int N>(int64_t j) {
    const Vector<T, N> in = load_vector<T, N>(x + j);
    float out[N];
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(in.v[i]) * factor;
    store_vector<T, N>(x + j, out);
  });
}

constexpr int kSummedTensors = 512;

struct ChunkSumParams {
  const float* partials;
  float* out;
  int first[kSummedTensors + 1];
  bool root;
};

template <int kWidth>
BU_KERNEL(kBlockThreads, 4)
chunk_sum_kernel(BU_PARAMS ChunkSumParams p) {
  const int tensor = static_cast<int>(blockIdx.x), end = p.first[tensor + 1];
  float sums[kWidth] = {};
  for (int i = p.first[tensor] + static_cast<int>(threadIdx.y * kLanesX + threadIdx.x); i < end;
       i += kBlockThreads) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      sums[k] += load_global<float>(p.partials + static_cast<int64_t>(i) * kWidth + k);
  }
  sum_over_block(sums, 0);
  if (threadIdx.y == 0 && threadIdx.x == 0) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      store_global(p.out + static_cast<int64_t>(tensor) * kWidth + k,
                   p.root ? sqrtf(sums[k]) : sums[k]);
  }
}

// f.operator()<T>(params, chunks) for the tensors of each dtype, a table at a time.
template <class F>
void for_dtypes(const std::vector<PlainTensor>& tensors, const std::vector<DType>& dtypes,
                const F& f) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    std::vector<PlainEntry> list;
    int chunk = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const PlainTensor& t = tensors[i];
      if (dtypes[i] == dtype)
        list.push_back({t.data, t.size, chunk, is_aligned(t.data, 16) ? 1 : 0});
      chunk += static_cast<int>(chunks_of(t.size));
    }
    for_tables(list, [&](const Table<PlainEntry>& table, int chunks) {
      if (chunks == 0) return;
      dispatch(dtype, [&]<class T>() { f.template operator()<T>(table, chunks); });
    });
  }
}

}  // namespace

void sum_chunks(const char* op, const float* partials, int width, const std::vector<int>& ends,
                bool root, float* out, cudaStream_t stream) {
  for (size_t begin = 0; begin < ends.size(); begin += kSummedTensors) {
    const int count = static_cast<int>(std::min<size_t>(kSummedTensors, ends.size() - begin));
    ChunkSumParams p{};
    p.partials = partials;
    p.out = out + begin * width;
    p.root = root;
    p.first[0] = begin == 0 ? 0 : ends[begin - 1];
    for (int i = 0; i < count; ++i) p.first[i + 1] = ends[begin + i];
    launch(op, width == 1 ? chunk_sum_kernel<1> : chunk_sum_kernel<kTensorSums>, dim3(count),
           dim3(kLanesX, kWarpsY), sum_over_y_bytes(kLanesX, kWarpsY, width), stream, p);
  }
}

int64_t multi_tensor_chunks(const std::vector<PlainTensor>& tensors) {
  return total_chunks(tensors);
}

void multi_tensor_l2norm(const std::vector<PlainTensor>& tensors, const std::vector<DType>& dtypes,
                         float* partials, float* total, float* each, cudaStream_t stream) {
  for_dtypes(tensors, dtypes, [&]<class T>(const Table<PlainEntry>& table, int chunks) {
    launch(kNorm, square_sum_kernel<T>, dim3(chunks), dim3(kLanesX, kWarpsY),
           sum_over_y_bytes(kLanesX, kWarpsY, 1), stream, PlainParams{table, partials, nullptr});
  });
  const std::vector<int> ends = chunk_ends(tensors);
  sum_chunks(kNorm, partials, 1, ends, true, each, stream);
  sum_chunks(kNorm, partials, 1, {ends.back()}, true, total, stream);
}

void multi_tensor_scale(const std::vector<PlainTensor>& tensors, const std::vector<DType>& dtypes,
                        const float* factor, cudaStream_t stream) {
  for_dtypes(tensors, dtypes, [&]<class T>(const Table<PlainEntry>& table, int chunks) {
    launch(kScale, scale_kernel<T>, dim3(chunks), dim3(kLanesX, kWarpsY), 0, stream,
           PlainParams{table, nullptr, factor});
  });
}

}  // namespace bert_unpad::cuda
