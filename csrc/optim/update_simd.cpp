// Adam, LAMB and StableAdamW on a CPU: one pass over the arrays, in strips of vectors.
#include "cpu/strip_simd.h"
#include "optim/optim.h"
#include "optim/stream_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

BU_INLINE f32v root(f32v v) {
#if defined(__AVX512F__)
  return (f32v)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
  return (f32v)_mm256_sqrt_ps((__m256)v);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
#endif
}

// n / (sqrt(v) c + eps). A square root and a division of 512 bits take 36 cycles, as long as it
// takes to stream 16 elements of all arrays; one Newton step each on the 14-bit estimates takes 10,
// to within 2 ulp. Steps that would be 0 * inf keep the estimate: roots of 0 and inf, 1 / inf.
BU_INLINE f32v divide_by_root(f32v n, f32v v, float c, float eps) {
#if defined(__AVX512F__)
  const __m512 x = (__m512)v, infinity = _mm512_set1_ps(__builtin_inff());
  const __mmask16 ordinary = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ) &
                             _mm512_cmp_ps_mask(x, infinity, _CMP_LT_OQ);
  const f32v y = (f32v)_mm512_rsqrt14_ps(x);
  const f32v s = v * y;
  const f32v refined = s + s * (0.5f - s * y * 0.5f);
  const f32v d = (f32v)_mm512_mask_mov_ps(x, ordinary, (__m512)refined) * c + eps;
  const f32v r = (f32v)_mm512_rcp14_ps((__m512)d);
  const __mmask16 finite = _mm512_cmp_ps_mask((__m512)d, infinity, _CMP_LT_OQ);
  return n * (f32v)_mm512_mask_mov_ps((__m512)r, finite, (__m512)(r * (2.0f - d * r)));
#else
  return n / (root(v) * c + eps);
#endif
}

// f of the array as what it is. Its type is known when the kernel runs: one branch for each strip,
// always the same way.
template <class F>
BU_INLINE auto as_typed(DType type, void* data, const F& f) {
  if (type == DType::kFloat32) return f(static_cast<float*>(data));
  if (type == DType::kBFloat16) return f(static_cast<bf16*>(data));
  return f(static_cast<f16*>(data));
}

// A strip of one tensor: weights, scaled gradient (where it is needed), moments after this step.
template <int N>
struct State {
  Strip<N> w, g, m, v;

  // n / (sqrt(v) / sqrt(1 - beta2^t) + eps).
  BU_INLINE Strip<N> normalised(const Strip<N>& n, const RuleFactors& f,
                                const Coefficients& c) const {
    return lockstep(
        [&](f32v a, f32v b)
            __attribute__((always_inline)) { return divide_by_root(a, b, c.denominator, f.eps); },
        n, v);
  }
};

// Element j and on of an array, and prefetching for what follows.
template <class Width>
BU_INLINE auto stream(DType type, const void* data, int64_t j, Width width) {
  return as_typed(type, const_cast<void*>(data), [&](const auto* p) __attribute__((always_inline)) {
    prefetch(p + j);
    return load_strip(p + j, width);
  });
}
template <class Width>
BU_INLINE auto load_weight(UpdateTypes types, const UpdateTensor& t, int64_t j, Width width) {
  return t.master ? load_strip(t.master + j, width) : stream(types.param, t.param, j, width);
}
template <class Width>
BU_INLINE auto load_grad(UpdateTypes types, const UpdateTensor& t, int64_t j, Width width) {
  return stream(types.grad, t.grad, j, width);
}
template <class Width, int N>
BU_INLINE void store_weight(UpdateTypes types, const UpdateTensor& t, int64_t j, Width width,
                            const Strip<N>& w) {
  if (t.master) store_strip(t.master + j, w, width);
  as_typed(types.param, t.param,
           [&](auto* param) __attribute__((always_inline)) { store_strip(param + j, w, width); });
}

BU_INLINE void prefetch_state(const UpdateTensor& t, int64_t j) {
  if (t.master) prefetch(t.master + j);
  prefetch(t.exp_avg + j);
  prefetch(t.exp_avg_sq + j);
}

// Loads a strip and moves its moments on; `l2` is the weight decay that joins the gradient.
template <class Width>
BU_INLINE auto advance(const RuleFactors& f, const Coefficients& c, UpdateTypes types,
                       const UpdateTensor& t, int64_t j, Width width, float l2) {
  prefetch_state(t, j);
  const auto w = load_weight(types, t, j, width);
  auto g = load_grad(types, t, j, width) * c.gradient;
  if (l2 != 0.0f) g = g + w * l2;
  auto m = load_strip(t.exp_avg + j, width), v = load_strip(t.exp_avg_sq + j, width);
  m = (m - m * f.decay1) + g * f.gradient1;
  v = (v - v * f.decay2) + g * g * f.decay2;
  store_strip(t.exp_avg + j, m, width);
  store_strip(t.exp_avg_sq + j, v, width);
  return State{w, g, m, v};
}

void adam(const RuleFactors& f, const Coefficients& c, UpdateTypes types, const UpdateTensor& t,
          int64_t begin, int64_t end) {
  const FlushDenormals flush;
  const float keep = f.decoupled ? 1.0f - c.lr * f.weight_decay : 1.0f;
  const float l2 = f.decoupled ? 0.0f : f.weight_decay;
  const float step = c.lr * c.momentum;
  for_strips(end - begin, [&](int64_t i, auto width) __attribute__((always_inline)) {
    const int64_t j = begin + i;
    const auto s = advance(f, c, types, t, j, width, l2);
    store_weight(types, t, j, width, s.w * keep - s.normalised(s.m * step, f, c));
  });
}

// Squares of a few thousand numbers are added up in fp32, these sums in double.
constexpr int64_t kRun = 4096;

// sum += s, without the lanes beyond the width (0 / eps there, NaN for eps = 0).
template <int N>
BU_INLINE void add_up(f32v& sum, const Strip<N>& s, Whole<N>) {
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) sum += s.v[i];
}
BU_INLINE void add_up(f32v& sum, const Strip<1>& s, Tail tail) { sum += first(s.v[0], tail); }

template <int N, class Width>
BU_INLINE void add_squares(f32v& sum, const Strip<N>& s, Width width) {
  add_up(sum, s * s, width);
}

void lamb_moments(const RuleFactors& f, const Coefficients& c, UpdateTypes types,
                  const UpdateTensor& t, int64_t begin, int64_t end, double* sums) {
  const FlushDenormals flush;
  for (int i = 0; i < kTensorSums; ++i) sums[i] = 0.0;
  for (int64_t run = begin; run < end; run += kRun) {
    f32v weights{}, updates{}, gradients{};
    const int64_t size = run + kRun < end ? kRun : end - run;
    for_strips(size, [&](int64_t i, auto width) __attribute__((always_inline)) {
      const auto s = advance(f, c, types, t, run + i, width, 0.0f);
      const auto decay = s.w * f.weight_decay;
      add_squares(weights, s.w, width);
      add_squares(updates, s.normalised(s.m * c.momentum, f, c) + decay, width);
      if (f.nesterov) add_squares(gradients, s.normalised(s.g, f, c) + decay, width);
    });
    sums[0] += static_cast<double>(reduce_add(weights));
    sums[1] += static_cast<double>(reduce_add(updates));
    sums[2] += static_cast<double>(reduce_add(gradients));
  }
}

void stable_adamw_moments(const RuleFactors& f, const Coefficients& c, UpdateTypes types,
                          const UpdateTensor& t, int64_t begin, int64_t end, double* sums) {
  const FlushDenormals flush;
  const float correction = c.denominator * c.denominator, smallest = f.eps * f.eps;
  sums[0] = static_cast<double>(end - begin);
  sums[1] = sums[2] = 0.0;
  for (int64_t run = begin; run < end; run += kRun) {
    f32v quotients{};
    const int64_t size = run + kRun < end ? kRun : end - run;
    for_strips(size, [&](int64_t i, auto width) __attribute__((always_inline)) {
      const auto s = advance(f, c, types, t, run + i, width, 0.0f);
      const auto quotient = lockstep(
          [&](f32v g, f32v v) __attribute__((always_inline)) {
            return g * g / vmax(v * splat(correction), splat(smallest));
          },
          s.g, s.v);
      add_up(quotients, quotient, width);
    });
    sums[1] += static_cast<double>(reduce_add(quotients));
  }
}

// The second pass of LAMB and StableAdamW.
void apply(const RuleFactors& f, const Coefficients& c, UpdateTypes types, const UpdateTensor& t,
           const float* ratios, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  // LANS: d = beta1 ratio (m + decay w) + (1 - beta1) ratio' (g + decay w).
  const float by_momentum = c.lr * ratios[0] * (f.nesterov ? f.beta1 : 1.0f);
  const float by_gradient = f.nesterov ? c.lr * ratios[1] * f.decay1 : 0.0f;
  const float keep = 1.0f - (by_momentum + by_gradient) * f.weight_decay;
  const float of_momentum = by_momentum * c.momentum, of_gradient = by_gradient * c.gradient;
  for_strips(end - begin, [&](int64_t i, auto width) __attribute__((always_inline)) {
    const int64_t j = begin + i;
    prefetch_state(t, j);
    const auto w = load_weight(types, t, j, width);
    const State s{w, w, load_strip(t.exp_avg + j, width), load_strip(t.exp_avg_sq + j, width)};
    auto u = s.m * of_momentum;
    if (f.nesterov) u = u + load_grad(types, t, j, width) * of_gradient;
    store_weight(types, t, j, width, w * keep - s.normalised(u, f, c));
  });
}

// The gradient is the new exp_avg where nothing of the old one is kept. A variance of 0, of what
// had no gradient, would divide by eps alone: nothing is added there, and exp_avg is 0.
void frozen_adam(const RuleFactors& f, const Coefficients& c, UpdateTypes types,
                 const UpdateTensor& t, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  const float keep = 1.0f - c.lr * f.weight_decay, step = c.lr * c.momentum;
  const auto where_varied = [](f32v x, f32v v) __attribute__((always_inline)) {
    return select(v > 0.0f, x, splat(0.0f));
  };
  for_strips(end - begin, [&](int64_t i, auto width) __attribute__((always_inline)) {
    const int64_t j = begin + i;
    prefetch_state(t, j);
    const auto w = load_weight(types, t, j, width);
    const auto v = load_strip(t.exp_avg_sq + j, width);
    auto m = load_grad(types, t, j, width) * (c.gradient * f.gradient1);
    if (f.decay1 != 1.0f) {
      const auto old = load_strip(t.exp_avg + j, width);
      m = (old - old * f.decay1) + m;
    }
    m = lockstep(where_varied, m, v);
    store_strip(t.exp_avg + j, m, width);
    const State s{w, w, m, v};
    // Again, because of an eps of 0.
    store_weight(types, t, j, width,
                 w * keep - lockstep(where_varied, s.normalised(m * step, f, c), v));
  });
}

void frozen_lamb_sums(const RuleFactors& f, UpdateTypes types, const UpdateTensor& t, int64_t begin,
                      int64_t end, double* sums) {
  const FlushDenormals flush;
  const float back = 1.0f / f.decay1;
  f32v largest{};
  sums[0] = sums[1] = 0.0;
  for (int64_t run = begin; run < end; run += kRun) {
    f32v adam{}, whole{};
    const int64_t size = run + kRun < end ? kRun : end - run;
    for_strips(size, [&](int64_t i, auto width) __attribute__((always_inline)) {
      const int64_t j = run + i;
      const auto m = load_grad(types, t, j, width), old = load_strip(t.exp_avg + j, width);
      const auto w = stream(types.param, t.param, j, width);
      const auto v = load_strip(t.exp_avg_sq + j, width);
      auto fresh = load_strip(t.master + j, width);
      const auto g = (m - (old - old * f.decay1)) * back;
      fresh = (fresh - fresh * f.decay2) + g * g * f.decay2;
      store_strip(t.master + j, fresh, width);
      const auto frozen_root = lockstep(root, v);
      const auto change = lockstep(
          [&](f32v x, f32v r) __attribute__((always_inline)) {
            return select(r > 0.0f, x / (r + f.eps), splat(0.0f));
          },
          m, frozen_root);
      const auto ratio = lockstep(
          [&](f32v r, f32v n) __attribute__((always_inline)) {
            return select(r > 0.0f, (r + f.eps) / (root(n) + f.eps), splat(0.0f));
          },
          frozen_root, fresh);
      add_squares(adam, change, width);
      add_squares(whole, change + w * f.weight_decay, width);
      constexpr int kVectors = sizeof(ratio.v) / sizeof(f32v);
      for (int k = 0; k < kVectors; ++k) largest = vmax(largest, ratio.v[k]);
    });
    sums[0] += static_cast<double>(reduce_add(adam));
    sums[1] += static_cast<double>(reduce_add(whole));
  }
  sums[2] = static_cast<double>(reduce_max(largest));
}

}  // namespace

extern const UpdateKernels update_kernels = {adam,  lamb_moments, stable_adamw_moments,
                                             apply, frozen_adam,  frozen_lamb_sums};

}  // namespace bert_unpad::BERT_UNPAD_ISA
