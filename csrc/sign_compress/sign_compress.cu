// Packing signs, and sums of packed signs, limited by memory.
//
// A warp packs 256 elements at a time: a lane loads one element out of every 32, a vote collects 32
// signs in a word, and each lane stores one of the 32 bytes. So loads and stores of a warp are
// whole lines, whatever the address, and the end needs no other path.
#include <cmath>

#include "common/finite.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/vector.h"
#include "sign_compress/sign_compress_cuda.h"

namespace bert_unpad::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
// 4 blocks of 256 threads with 8 loads of value and error each keep 64 KiB in flight on an SM,
// where an H100 needs some 20 KiB to hide its memory's latency. Not measured.
constexpr int kBlocks = 4, kInFlight = 8;
constexpr int kWarpElements = 32 * kInFlight, kBlockElements = kWarps * kWarpElements;
constexpr unsigned kSharedBytes = sum_over_y_bytes(32, kWarps, 1);

struct NoValue {};

BU_DEVICE bool stops(const float* guard) {
  return guard != nullptr && !is_finite(load_global<float>(guard));
}

// x with its sign turned where `negative` is 1.
BU_DEVICE float turn_sign(float x, uint32_t negative) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(x) ^ negative << 31);
}

// body(first element of this warp's, value + error of the lane's elements first + 32 k + lane), 0
// beyond the end. All lanes of a warp call it as often.
template <class T, class Body>
BU_DEVICE void for_warp_elements(const SignCudaParams& p, const Body& body) {
  const int64_t lane = threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlockElements;
  int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y) * kWarpElements;
  for (; first < p.size; first += step) {
    float u[kInFlight], value[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t j = first + 32 * k + lane;
      u[k] = j < p.size ? load_global<float>(p.error + j) : 0.0f;
      value[k] = 0.0f;
      if constexpr (sizeof(T) > 1)
        if (j < p.size) value[k] = to_float(load_global<T>(static_cast<const T*>(p.value) + j));
    }
    if constexpr (sizeof(T) > 1) {
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) u[k] = value[k] + u[k];
    }
    body(first, u);
  }
}

template <class T>
BU_KERNEL(kThreads, kBlocks)
sign_square_sum_kernel(BU_PARAMS SignCudaParams p) {
  float sum[1] = {0.0f};
  for_warp_elements<T>(p, [&](int64_t, const float (&u)[kInFlight]) {
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) sum[0] += u[k] * u[k];
  });
  sum_over_block(sum, 0);
  if (threadIdx.x == 0 && threadIdx.y == 0) store_global(p.partials + blockIdx.x, sum[0]);
}

struct ScaleParams {
  const float* partials;
  float* scale;
  int64_t size;
  int64_t count;  // of partials
};

BU_KERNEL(kThreads, 1)
sign_scale_kernel(BU_PARAMS ScaleParams p) {
  float sum[1] = {0.0f};
  for (int i = static_cast<int>(threadIdx.y * 32 + threadIdx.x); i < p.count; i += kThreads)
    sum[0] += load_global<float>(p.partials + i);
  sum_over_block(sum, 0);
  if (threadIdx.x == 0 && threadIdx.y == 0)
    store_global(p.scale, p.size == 0 ? 0.0f : std::sqrt(sum[0] / static_cast<float>(p.size)));
}

template <class T>
BU_KERNEL(kThreads, kBlocks)
sign_pack_kernel(BU_PARAMS SignCudaParams p) {
  if (stops(p.guard)) return;
  const float scale = load_global<float>(p.scale);
  const int lane = static_cast<int>(threadIdx.x);
  for_warp_elements<T>(p, [&](int64_t first, const float (&u)[kInFlight]) {
    uint32_t word = 0;  // the one that holds this lane's byte
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const uint32_t negative = std::bit_cast<uint32_t>(u[k]) >> 31;
      const uint32_t signs = ballot(negative != 0);
      if (k == lane / 4) word = signs;
      const int64_t j = first + 32 * k + lane;
      if (j < p.size) store_global(p.error + j, u[k] - turn_sign(scale, negative));
    }
    if (first + 8 * lane < p.size)
      store_global(p.bits + first / 8 + lane, static_cast<uint8_t>(word >> (8 * (lane % 4))));
  });
}

// A thread has two groups of 4 neighbours, 128 elements apart: half a byte of each row for each.
template <bool kVectors>
BU_KERNEL(kThreads, kBlocks)
sign_mean_kernel(BU_PARAMS SignMeanCudaParams p) {
  if (stops(p.guard)) return;
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBlockElements;
  int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y) * kWarpElements;
  for (; first < p.size; first += step) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int64_t j = first + 128 * group + 4 * lane;
      if (j >= p.size) continue;
      float sum[4] = {};
      const uint8_t* byte = p.bits + j / 8;
      const int64_t rows = p.rows_follow ? 1 : p.rows;
      const int64_t skipped = p.rows_follow ? j / 8 / p.stride : 0;
      for (int64_t r = 0; r < rows; ++r, byte += p.stride) {
        const float weight = load_global<float>(p.scales + skipped + r) * p.factor;
        const uint32_t bits = load_global<uint8_t>(byte) >> (j % 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += turn_sign(weight, bits >> i & 1);
      }
      if (kVectors && j + 4 <= p.size) {
        if (p.add) {
          const Vector<float, 4> old = load_vector<float, 4>(p.out + j);
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[i] = old.v[i] + sum[i];
        }
        store_vector<float, 4>(p.out + j, sum);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (j + i >= p.size) break;
          const float old = p.add ? load_global<float>(p.out + j + i) : 0.0f;
          store_global(p.out + j + i, p.add ? old + sum[i] : sum[i]);
        }
      }
    }
  }
}

// f.operator()<T>() for the type of the value; NoValue where there is none.
template <class F>
void dispatch_value(const SignCudaParams& p, const F& f) {
  if (p.value == nullptr) return f.template operator()<NoValue>();
  dispatch(p.dtype, [&]<class T>() { f.template operator()<T>(); });
}

dim3 grid_of(int64_t size) { return dim3(static_cast<unsigned>(sign_blocks(size))); }

}  // namespace

int64_t sign_blocks(int64_t size) {
  return std::clamp<int64_t>((size + kBlockElements - 1) / kBlockElements, 1,
                             static_cast<int64_t>(sm_count("sign_scale")) * kBlocks);
}

void sign_scale(const SignCudaParams& p, cudaStream_t stream) {
  const char* op = "sign_scale";
  const dim3 grid = grid_of(p.size), block(32, kWarps);
  dispatch_value(p, [&]<class T>() {
    launch(op, sign_square_sum_kernel<T>, grid, block, kSharedBytes, stream, p);
  });
  launch(op, sign_scale_kernel, dim3(1), block, kSharedBytes, stream,
         ScaleParams{p.partials, p.scale, p.size, grid.x});
}

void sign_pack(const SignCudaParams& p, cudaStream_t stream) {
  if (p.size == 0) return;
  dispatch_value(p, [&]<class T>() {
    launch("sign_pack_", sign_pack_kernel<T>, grid_of(p.size), dim3(32, kWarps), 0, stream, p);
  });
}

void sign_mean(const SignMeanCudaParams& p, cudaStream_t stream) {
  if (p.size == 0) return;
  launch("sign_mean_", is_aligned(p.out, 16) ? sign_mean_kernel<true> : sign_mean_kernel<false>,
         grid_of(p.size), dim3(32, kWarps), 0, stream, p);
}

}  // namespace bert_unpad::cuda
