// The parts of the CUDA kernels with a LayerNorm. A thread works on groups of 8 neighbouring
// columns of a row: 16 bytes of bf16, and half of the columns that one Philox call decides about.
#pragma once

#include "cuda/dropout_pairs.h"
#include "cuda/primitives.h"
#include "cuda/reduce.h"
#include "cuda/vector.h"

namespace bert_unpad {

inline constexpr int kGroup = 8;  // columns

// A group as it is in memory.
template <class T>
struct Group {
  static constexpr int kWidth = kVectorWidth<T>;
  Vector<T, kWidth> parts[kGroup / kWidth];

  BU_DEVICE float operator[](int i) const { return to_float(parts[i / kWidth].v[i % kWidth]); }
};

// kWide: 16 bytes at a time; p is aligned and all 8 columns exist. Otherwise one element at a time,
// the first `count`; the others are zero.
template <bool kWide, class T>
BU_DEVICE Group<T> load_group(const T* p, int count) {
  Group<T> group;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if constexpr (kWide) {
      if (i % Group<T>::kWidth == 0)
        group.parts[i / Group<T>::kWidth] = load_vector<T, Group<T>::kWidth>(p + i);
    } else {
      group.parts[i / Group<T>::kWidth].v[i % Group<T>::kWidth] =
          i < count ? load_vector<T, 1>(p + i).v[0] : T{};
    }
  }
  return group;
}

template <bool kWide, class T>
BU_DEVICE void store_group(T* p, const float (&x)[kGroup], int count) {
  if constexpr (kWide) {
    store_vector<T, kGroup>(p, x);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if (i < count) store_global<T>(p + i, from_float<T>(x[i]));
  }
}

// Groups of a thread's next row that are on their way while it works on this one. They lie where no
// other thread reads or writes, so that the thread alone has to wait for them. The copies of a row
// begin when the row before has been taken out.
class NextGroups {
  uint32_t shared_, step_;  // where this thread's first group lies; from group to group

 public:
  BU_DEVICE NextGroups(uint32_t offset, int threads)
      : shared_(offset + 16 * (threadIdx.y * blockDim.x + threadIdx.x)), step_(16 * threads) {}
  static constexpr uint32_t bytes(int threads, int groups) {
    return static_cast<uint32_t>(16 * threads * groups);
  }

  // Number `i` of them, of 16 bytes.
  BU_DEVICE void copy(int i, const void* from) const {
    copy_async_16(shared_ + i * step_, from, true);
  }
  template <class T>
  BU_DEVICE Group<T> take(int i) const {
    static_assert(sizeof(Group<T>) == 16);
    return load_shared<Group<T>>(shared_ + i * step_);
  }
};

// Row dropout of one call of an operator.
struct RowDropout {
  RngKey key;
  uint32_t threshold;
  PairRule rule;

  BU_DEVICE RowDropout(const int64_t* rng, uint32_t keep)
      : key(load_rng_key(rng)), threshold(keep), rule(keep) {}

  // Bit i: is column `column` + i kept? All are where there is no dropout.
  BU_DEVICE uint32_t kept(int64_t row, int column) const {
    if (threshold == 65536u) return 0xffu;
    return bits_of(eight_decisions(draw(row, column / kGroup), column / kGroup % 2 != 0));
  }

  // The same for groups thread, thread + threads, ... of a row, which an even number of threads
  // holds; all lanes take part. Neighbouring groups share a call: of two such groups each of the
  // two threads draws one call, and tells the other one.
  template <int kGroups>
  BU_DEVICE void kept(int64_t row, int thread, int threads, uint32_t (&masks)[kGroups]) const {
    const bool odd = thread % 2 != 0;
#pragma unroll
    for (int v = 0; v < kGroups; v += 2) {
      if (threshold == 65536u || v + 1 == kGroups) {
        masks[v] = kept(row, (v * threads + thread) * kGroup);
        if (v + 1 < kGroups) masks[v + 1] = masks[v];
        continue;
      }
      const Philox4 bits = draw(row, (v + (odd ? 1 : 0)) * threads + thread);
      const uint32_t first = bits_of(eight_decisions(bits, false));
      const uint32_t last = bits_of(eight_decisions(bits, true));
      const uint32_t got = shuffle_xor(odd ? first : last, 1);
      masks[v] = odd ? got : first;
      masks[v + 1] = odd ? last : got;
    }
  }

 private:
  BU_DEVICE Philox4 draw(int64_t row, int group) const {
    return row_dropout_bits(key, static_cast<uint32_t>(row), static_cast<uint32_t>(group) / 2);
  }
  // A bit for each of 8 decisions.
  BU_DEVICE uint32_t bits_of(const Philox4& pairs) const {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) mask |= rule.kept(pairs.w[i]) & (0x00020001u << (2 * i));
    return (mask | mask >> 16) & 0xffu;
  }
};

// Zeroes what is not in the mask and scales the rest.
BU_DEVICE void drop(float (&x)[kGroup], uint32_t mask, float scale) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = (mask >> i & 1u) != 0 ? x[i] * scale : 0.0f;
}

// A parameter vector in fp32 or 16 bits; null where there is none.
struct Parameter {
  const void* p;
  DType dtype;
};

// Where the gradient of a parameter vector goes; null where it is not wanted.
struct Result {
  void* p;
  DType dtype;
};

// Parameters as fp32 in shared memory: the loop over rows has no branch on their dtype, and a row
// held by one warp leaves no registers for them. The lower and the upper four columns of the groups
// are apart, so that neighbouring threads read neighbouring 16 bytes.
struct SharedParameters {
  uint32_t begin, half_bytes;

  BU_DEVICE SharedParameters(uint32_t offset, int hidden)
      : begin(offset), half_bytes(static_cast<uint32_t>(hidden) * 2) {}
  static constexpr uint32_t bytes(int64_t hidden, int count) {
    return static_cast<uint32_t>(hidden * count * 4);
  }

  // The same parameters, but the compiler does not know that: it reads them again, where it would
  // otherwise keep them in registers.
  BU_DEVICE SharedParameters reloaded() const {
    SharedParameters other = *this;
    other.begin = keep_in_register(begin);
    return other;
  }

  // As parameter number `which`, by all threads of the block; a barrier has to follow.
  BU_DEVICE void put(int which, const Parameter& from, int hidden) const {
    const int threads = blockDim.x * blockDim.y;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < hidden; i += threads) {
      const float x = from.p == nullptr ? 0.0f : load_parameter(from.p, from.dtype, i);
      store_shared<float>(address(which, i / kGroup, i % kGroup / 4) + 4 * (i % 4), x);
    }
  }

  BU_DEVICE void get(int which, int column, float (&out)[kGroup]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto quad = load_shared<Vector<float, 4>>(address(which, column / kGroup, half));
#pragma unroll
      for (int i = 0; i < 4; ++i) out[4 * half + i] = quad.v[i];
    }
  }

 private:
  BU_DEVICE uint32_t address(int which, int group, int half) const {
    return begin + (2 * which + half) * half_bytes + 16 * group;
  }
};

// The same from global memory, for rows that are too long or not made of whole groups.
struct GlobalParameters {
  Parameter from[3];
  int hidden;

  BU_DEVICE void get(int which, int column, float (&out)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const bool inside = from[which].p != nullptr && column + i < hidden;
      out[i] = inside ? load_parameter(from[which].p, from[which].dtype, column + i) : 0.0f;
    }
  }
};

inline constexpr int kMaxRowWarps = 16;

// The threads that hold a row: a warp, or a block of at most kMaxRowWarps warps. Adds up over them;
// all of them get the sums. One barrier each time: turns use two places in shared memory.
template <bool kBlockRow>
struct RowSum {
  static constexpr uint32_t kBytes = kBlockRow ? 2 * 2 * 4 * kMaxRowWarps : 0;
  uint32_t shared, turn = 0;

  BU_DEVICE explicit RowSum(uint32_t offset) : shared(offset) {}

  template <int N>
  BU_DEVICE void operator()(float (&x)[N]) {
    static_assert(N <= 2);
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] = warp_sum(x[n]);
    if constexpr (kBlockRow) {
      const uint32_t warps = blockDim.x / 32, place = shared + turn * (kBytes / 2);
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int n = 0; n < N; ++n)
          store_shared<float>(place + 4 * (n * kMaxRowWarps + threadIdx.x / 32), x[n]);
      }
      sync_block();
#pragma unroll
      for (int n = 0; n < N; ++n) {
        x[n] = 0.0f;
        for (uint32_t w = 0; w < warps; ++w)
          x[n] += load_shared<float>(place + 4 * (n * kMaxRowWarps + w));
      }
      turn ^= 1;
    }
  }
};

}  // namespace bert_unpad
