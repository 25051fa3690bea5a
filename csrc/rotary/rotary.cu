// Rotates pairs of elements, limited by memory: every element is read and written once, 16 bytes at
// a time.
//
// A thread keeps its pairs and walks over tokens and heads, so their steps stay in registers, and
// cosines and sines are computed once for a token's heads, about 40 instructions a pair.
#include "cuda/launch.h"
#include "cuda/math.h"
#include "cuda/vector.h"
#include "rotary/rotary_cuda.h"

namespace bert_unpad::cuda {
namespace {

constexpr const char* kName = "rotary";
constexpr int kThreads = 128;
// Blocks on an SM, and heads that a thread rotates with the angles of a token. Not measured: four
// heads make the angles a small part of the instructions.
constexpr int kBlocks = 6, kHeads = 4;

struct Angle {
  float cosine, sine;
};

// Of `phase` / 2^32 turns: those of the rest beside the nearest quarter turn, which then exchanges
// them or changes their signs.
BU_DEVICE Angle angle_of(uint32_t phase) {
  const uint32_t quarters = (phase + 0x20000000u) >> 30;
  const float r =
      static_cast<float>(static_cast<int32_t>(phase - (quarters << 30))) * kPhaseRadians;
  const float z = r * r;
  const float c = fma(fma(fma(z, kCosine2, kCosine1), z, kCosine0), z * z, fma(z, -0.5f, 1.0f));
  const float s = fma(fma(fma(z, kSine2, kSine1), z, kSine0), z * r, r);
  const float cosine = quarters & 1 ? s : c, sine = quarters & 1 ? c : s;
  return {(quarters + 1) & 2 ? -cosine : cosine, quarters & 2 ? -sine : sine};
}

// The pairs of a thread: kPairs neighbours, in two vectors. A thread's first vector is at element
// `first` of a head and its second one at `second`.
template <class T, int kPairs, bool kInterleaved>
struct Pairs {
  static constexpr int kFirst = kInterleaved ? 2 : 1;  // elements from a pair to the next
  int64_t first, second;

  BU_DEVICE Pairs(int64_t pair, int64_t pairs)
      : first(pair * kFirst), second(kInterleaved ? first + kPairs : first + pairs) {}

  BU_DEVICE void rotate(const T* x, T* out, const Angle (&angles)[kPairs]) const {
    const auto low = load_vector<T, kPairs>(x + first), high = load_vector<T, kPairs>(x + second);
    float v[2][kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      v[0][i] = to_float(low.v[i]);
      v[1][i] = to_float(high.v[i]);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      // Where the pair's elements are, as one array after the other.
      const int a = kInterleaved ? 2 * i : i, b = kInterleaved ? 2 * i + 1 : kPairs + i;
      float &p = v[a / kPairs][a % kPairs], &q = v[b / kPairs][b % kPairs];
      const float turned = fma(p, angles[i].cosine, -(q * angles[i].sine));
      q = fma(q, angles[i].cosine, p * angles[i].sine);
      p = turned;
    }
    store_vector<T, kPairs>(out + first, v[0]);
    store_vector<T, kPairs>(out + second, v[1]);
  }
};

// A thread's x is its pairs; of its y the lower part says which heads are its, the upper part which
// of the block's tokens.
template <class T, int kPairs, bool kInterleaved>
BU_KERNEL(kThreads, kBlocks)
rotary_kernel(BU_PARAMS RotaryCudaParams p, int heads_at_once) {
  const Pairs<T, kPairs, kInterleaved> pairs(static_cast<int64_t>(threadIdx.x) * kPairs, p.pairs);
  if (static_cast<int64_t>(threadIdx.x) * kPairs >= p.pairs) return;
  uint64_t steps[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) steps[i] = p.steps[threadIdx.x * kPairs + i];
  const int first_head = threadIdx.y % heads_at_once;
  const int64_t tokens_at_once = blockDim.y / heads_at_once;
  int64_t token = blockIdx.x * tokens_at_once + threadIdx.y / heads_at_once;
  for (; token < p.tokens; token += gridDim.x * tokens_at_once) {
    const int64_t position =
        p.wide_positions ? load_global<int64_t>(static_cast<const int64_t*>(p.positions) + token)
                         : load_global<int32_t>(static_cast<const int32_t*>(p.positions) + token);
    Angle angles[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      angles[i] = angle_of(static_cast<uint32_t>(static_cast<uint64_t>(position) * steps[i] >> 32));
    const T* x = static_cast<const T*>(p.x) + token * p.x_token_stride;
    T* out = static_cast<T*>(p.out) + token * p.out_token_stride;
#pragma unroll 2
    for (int64_t head = first_head; head < p.heads; head += heads_at_once)
      pairs.rotate(x + head * p.x_head_stride, out + head * p.out_head_stride, angles);
  }
}

// Pairs of a thread: a 16-byte vector of each of their elements where all addresses allow that,
// else one.
int pairs_of_thread(const RotaryCudaParams& p) {
  const int width = 16 / element_size(p.dtype);
  const bool aligned = p.pairs % width == 0 && is_aligned(p.x, 16) && is_aligned(p.out, 16) &&
                       p.x_token_stride % width == 0 && p.x_head_stride % width == 0 &&
                       p.out_token_stride % width == 0 && p.out_head_stride % width == 0;
  return aligned ? width : 1;
}

template <class T, int kPairs, bool kInterleaved>
void launch_rotary(const RotaryCudaParams& p, cudaStream_t stream) {
  unsigned width = 1, heads = 1;
  while (width * kPairs < p.pairs) width *= 2;
  while (width * heads < kThreads && heads * kHeads < p.heads) heads *= 2;
  const dim3 block(width, kThreads / width);
  const int64_t tokens_at_once = block.y / heads;
  const int64_t blocks = (p.tokens + tokens_at_once - 1) / tokens_at_once;
  const int64_t fill = static_cast<int64_t>(sm_count(kName)) * kBlocks;
  launch(kName, rotary_kernel<T, kPairs, kInterleaved>,
         dim3(static_cast<unsigned>(std::min(blocks, fill))), block, 0, stream, p,
         static_cast<int>(heads));
}

}  // namespace

void rotary(const RotaryCudaParams& p, cudaStream_t stream) {
  if (p.tokens == 0 || p.heads == 0) return;
  const bool vectors = pairs_of_thread(p) > 1;
  dispatch(p.dtype, [&]<class T>() {
    if (vectors)
      p.interleaved ? launch_rotary<T, kVectorWidth<T>, true>(p, stream)
                    : launch_rotary<T, kVectorWidth<T>, false>(p, stream);
    else
      p.interleaved ? launch_rotary<T, 1, true>(p, stream) : launch_rotary<T, 1, false>(p, stream);
  });
}

}  // namespace bert_unpad::cuda
