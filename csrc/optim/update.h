// What the kernels of Adam and LAMB share: parameters, and a thread's elements of one tensor.
#pragma once

#include <cmath>

#include "cuda/launch.h"
#include "cuda/vector.h"
#include "optim/chunk_sums.h"
#include "optim/optim_cuda.h"

namespace bert_unpad::cuda {

struct UpdateEntry {
  void* param;
  const void* grad;
  float *exp_avg, *exp_avg_sq, *master;
  int64_t size;
  int64_t aligned;
};

// Without padding: where variables are filled with a pattern, as in the model of a block, GCC 12
// clears the padding after an array too early, inside the array.
struct UpdateParams {
  Table<UpdateEntry> table;
  RuleFactors f;
  const Coefficients* coefficients;  // [tensors]
  float* partials;
  const float* sums;
};
static_assert(sizeof(UpdateParams) <= 4096);
static_assert(sizeof(UpdateEntry) == 7 * 8);
static_assert(sizeof(RuleFactors) == 6 * 4 + 4 + 2 * 2);
static_assert(sizeof(Table<UpdateEntry>) ==
              kTableTensors * sizeof(UpdateEntry) + (kTableTensors + 1 + 3) * sizeof(int));
static_assert(sizeof(UpdateParams) ==
              sizeof(Table<UpdateEntry>) + sizeof(RuleFactors) + 3 * sizeof(void*));

// Elements that a thread takes at once: 16 bytes of the narrower of the two types.
template <class P, class G>
inline constexpr int kUpdateWidth =
    kVectorWidth<P> > kVectorWidth<G> ? kVectorWidth<P> : kVectorWidth<G>;

// N elements as fp32, in loads of 16 bytes.
template <class T, int N>
BU_DEVICE void load_floats(const T* p, float (&out)[N]) {
  constexpr int kPiece = N < kVectorWidth<T> ? N : kVectorWidth<T>;
#pragma unroll
  for (int first = 0; first < N; first += kPiece) {
    const Vector<T, kPiece> in = load_vector<T, kPiece>(p + first);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) out[first + i] = to_float(in.v[i]);
  }
}

template <class P, int N>
BU_DEVICE void load_weight(const UpdateEntry& t, int64_t j, float (&w)[N]) {
  if (t.master != nullptr)
    load_floats<float, N>(t.master + j, w);
  else
    load_floats<P, N>(static_cast<const P*>(t.param) + j, w);
}
template <class P, int N>
BU_DEVICE void store_weight(const UpdateEntry& t, int64_t j, const float (&w)[N]) {
  if (t.master != nullptr) store_vector<float, N>(t.master + j, w);
  store_vector<P, N>(static_cast<P*>(t.param) + j, w);
}

// Weights, scaled gradient, and the moments after this step, which are stored.
template <int N>
struct UpdateState {
  float w[N], g[N], m[N], v[N];
};

// `l2` is the weight decay that joins the gradient.
template <class P, class G, int N>
BU_DEVICE void advance(const RuleFactors& f, const Coefficients& c, const UpdateEntry& t, int64_t j,
                       float l2, UpdateState<N>& s) {
  load_weight<P>(t, j, s.w);
  load_floats<G, N>(static_cast<const G*>(t.grad) + j, s.g);
  load_floats<float, N>(t.exp_avg + j, s.m);
  load_floats<float, N>(t.exp_avg_sq + j, s.v);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    s.g[i] = s.g[i] * c.gradient + s.w[i] * l2;
    s.m[i] = (s.m[i] - s.m[i] * f.decay1) + s.g[i] * f.gradient1;
    s.v[i] = (s.v[i] - s.v[i] * f.decay2) + s.g[i] * s.g[i] * f.decay2;
  }
  store_vector<float, N>(t.exp_avg + j, s.m);
  store_vector<float, N>(t.exp_avg_sq + j, s.v);
}

BU_DEVICE float divide_by_root(float n, float v, float c, float eps) {
  return n / (sqrtf(v) * c + eps);
}

// The coefficients of a tensor, read by every thread.
BU_DEVICE Coefficients load_coefficients(const UpdateParams& p, const Place& at) {
  return load_global<Coefficients>(p.coefficients + p.table.first_tensor + at.entry);
}

// launch_table(params, chunks) for all tables of a call.
template <class F>
void for_update_tables(const UpdateCall& call, const F& launch_table) {
  std::vector<UpdateEntry> list;
  for (const UpdateTensor& t : call.tensors) {
    bool aligned = true;
    for (const void* p :
         {static_cast<const void*>(t.param), t.grad, static_cast<const void*>(t.exp_avg),
          static_cast<const void*>(t.exp_avg_sq), static_cast<const void*>(t.master)})
      aligned = aligned && is_aligned(p, 16);
    list.push_back({t.param, t.grad, t.exp_avg, t.exp_avg_sq, t.master, t.size, aligned ? 1 : 0});
  }
  for_tables(list, [&](const Table<UpdateEntry>& table, int chunks) {
    if (chunks > 0)
      launch_table(UpdateParams{table, factors_of(call.rule), call.coefficients, nullptr, nullptr},
                   chunks);
  });
}

// f.operator()<P, G>() for the types that the bindings let pass.
template <class F>
void dispatch_update(const UpdateCall& call, const F& f) {
  dispatch(call.grad_dtype, [&]<class G>() {
    if (call.param_dtype == DType::kFloat32) f.template operator()<float, G>();
  });
  if (call.param_dtype == DType::kFloat32) return;
  const bool same = call.grad_dtype == call.param_dtype;
  if (call.param_dtype == DType::kBFloat16)
    same ? f.template operator()<bf16, bf16>() : f.template operator()<bf16, float>();
  else
    same ? f.template operator()<f16, f16>() : f.template operator()<f16, float>();
}

}  // namespace bert_unpad::cuda
