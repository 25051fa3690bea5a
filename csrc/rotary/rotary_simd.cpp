// Rotates the pairs of a token's heads. Cosines and sines of a token are computed once, for all of
// its heads, and not kept: with them in a table every call would read as many numbers as a head
// has.
#include "cpu/columns_simd.h"
#include "rotary/rotary.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

typedef uint64_t u64v __attribute__((vector_size(4 * kLanes), may_alias));

// Of one token; as many as there are steps.
struct Angles {
  alignas(64) float cosine[2 * kMaxRotaryPairs], sine[2 * kMaxRotaryPairs];
};

// Cosine and sine of `phase` / 2^32 turns: those of the rest beside the nearest quarter turn, which
// then exchanges them or changes their signs.
BU_INLINE void cosine_and_sine(u32v phase, float* cosine, float* sine) {
  const u32v quarters = (phase + 0x20000000u) >> 30;
  const f32v r = __builtin_convertvector((i32v)(phase - (quarters << 30)), f32v) * kPhaseRadians;
  const f32v z = r * r;
  const f32v c = ((z * kCosine2 + kCosine1) * z + kCosine0) * (z * z) + (z * -0.5f + 1.0f);
  const f32v s = ((z * kSine2 + kSine1) * z + kSine0) * (z * r) + r;
  const i32v odd = (i32v)(quarters << 31) < 0;
  store(cosine, as_f32(as_u32(select(odd, s, c)) ^ (((quarters + 1) & 2u) << 30)));
  store(sine, as_f32(as_u32(select(odd, c, s)) ^ ((quarters & 2u) << 30)));
}

// The upper half of position * step, modulo 2^64.
void set_angles(const RotaryCpuParams& p, int64_t position, int64_t steps, Angles& angles) {
  const auto low = static_cast<uint32_t>(position), high = static_cast<uint32_t>(position >> 32);
  for (int64_t j = 0; j < steps; j += kLanes) {
    const u32v step_low = load_bits<u32v>(p.step_low + j);
    const u32v step_high = load_bits<u32v>(p.step_high + j);
    u32v carried, unused;
    mul_hi_lo(step_low, low, carried, unused);
    cosine_and_sine(carried + step_high * low + step_low * high, angles.cosine + j,
                    angles.sine + j);
  }
}

// Pairs of elements j and pairs + j.
template <class T>
BU_INLINE void rotate_halves(const T* x, T* out, int64_t pairs, const Angles& angles) {
  for_columns(pairs, [&](int64_t j, auto width) {
    const f32v a = load(x + j, width), b = load(x + pairs + j, width);
    const f32v c = load(angles.cosine + j), s = load(angles.sine + j);
    store(out + j, a * c - b * s, width);
    store(out + pairs + j, b * c + a * s, width);
  });
}

// Pairs of elements 2j and 2j + 1; their sines have the signs.
template <class T>
BU_INLINE void rotate_neighbours(const T* x, T* out, int64_t pairs, const Angles& angles) {
  for_columns(2 * pairs, [&](int64_t j, auto width) {
    const f32v v = load(x + j, width);
    const u64v bits = (u64v)v;
    const f32v swapped = (f32v)((bits >> 32) | (bits << 32));
    store(out + j, v * load(angles.cosine + j) + swapped * load(angles.sine + j), width);
  });
}

template <class T>
void rotate_tokens(const RotaryCpuParams& p, int64_t begin, int64_t end) {
  Angles angles;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t position = p.wide_positions ? static_cast<const int64_t*>(p.positions)[token]
                                              : static_cast<const int32_t*>(p.positions)[token];
    set_angles(p, position, p.interleaved ? 2 * p.pairs : p.pairs, angles);
    const T* x = static_cast<const T*>(p.x) + token * p.x_token_stride;
    T* out = static_cast<T*>(p.out) + token * p.out_token_stride;
    for (int64_t head = 0; head < p.heads; ++head) {
      if (p.interleaved)
        rotate_neighbours(x, out, p.pairs, angles);
      else
        rotate_halves(x, out, p.pairs, angles);
      x += p.x_head_stride;
      out += p.out_head_stride;
    }
  }
}

void rotate(const RotaryCpuParams& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case DType::kFloat32:
      return rotate_tokens<float>(p, begin, end);
    case DType::kBFloat16:
      return rotate_tokens<bf16>(p, begin, end);
    case DType::kFloat16:
      return rotate_tokens<f16>(p, begin, end);
  }
}

}  // namespace

extern const RotaryKernels rotary_kernels = {rotate};

}  // namespace bert_unpad::BERT_UNPAD_ISA
