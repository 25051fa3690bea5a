// The four attention operators, from their arguments to one call of a device's kernels.
//
// Each device has a class `Call` (in attention_cpu.cpp and attention_cuda.cpp) with
//   Call(op)                         has the public members `op` and `p`, the params struct
//   set_model(like, heads, head_dim, settings)
//   set_sequences(q, k, settings)    checks both sides' sequences against the rows in `p`
//   set_saved(dout, out, lse, q)     the results of forward; q: a tensor of the queries' rows
//   forward(), backward()            run the kernels on `p`
#pragma once

#include <optional>
#include <tuple>

#include "attention/arguments.h"

namespace bert_unpad {

// The arguments that all four have.
struct AttentionSettings {
  double scale, dropout_p;
  const std::optional<Tensor>&rng, &order, &groups;
};

template <class Call>
void prepare(Call& call, const Tensor& qkv, const Tensor& cu_seqlens, int64_t max_seqlen,
             const AttentionSettings& settings) {
  check_qkv(qkv, call.op);
  call.set_model(qkv, qkv.size(2), qkv.size(3), settings);
  set_qkv(call.p, qkv);
  const AttentionRows rows{qkv, "qkv", cu_seqlens, "cu_seqlens", max_seqlen};
  call.set_sequences(rows, rows, settings);
}

template <class Call>
void prepare(Call& call, const Tensor& q, const Tensor& kv, const Tensor& cu_q, const Tensor& cu_k,
             int64_t max_q, int64_t max_k, const AttentionSettings& settings) {
  check_q_kv(q, kv, call.op);
  call.set_model(q, q.size(1), q.size(2), settings);
  set_q_kv(call.p, q, kv);
  call.set_sequences({q, "q", cu_q, "cu_seqlens_q", max_q}, {kv, "kv", cu_k, "cu_seqlens_k", max_k},
                     settings);
}

template <class Call>
std::tuple<Tensor, Tensor> varlen_attention(Tensor qkv, Tensor cu_seqlens, int64_t max_seqlen,
                                            double scale, double dropout_p,
                                            std::optional<Tensor> rng, std::optional<Tensor> order,
                                            std::optional<Tensor> groups) {
  Call call("varlen_attention");
  prepare(call, qkv, cu_seqlens, max_seqlen, {scale, dropout_p, rng, order, groups});
  auto result = new_outputs(call.p, qkv, qkv.size(0));
  call.forward();
  return result;
}

template <class Call>
Tensor varlen_attention_backward(Tensor dout, Tensor qkv, Tensor out, Tensor lse, Tensor cu_seqlens,
                                 int64_t max_seqlen, double scale, double dropout_p,
                                 std::optional<Tensor> rng, std::optional<Tensor> order,
                                 std::optional<Tensor> groups) {
  Call call("varlen_attention_backward");
  prepare(call, qkv, cu_seqlens, max_seqlen, {scale, dropout_p, rng, order, groups});
  call.set_saved(dout, out, lse, qkv);
  Tensor dqkv = new_qkv_gradient(call.p, qkv);
  call.backward();
  return dqkv;
}

template <class Call>
std::tuple<Tensor, Tensor> varlen_cross_attention(Tensor q, Tensor kv, Tensor cu_seqlens_q,
                                                  Tensor cu_seqlens_k, int64_t max_seqlen_q,
                                                  int64_t max_seqlen_k, double scale,
                                                  double dropout_p, std::optional<Tensor> rng,
                                                  std::optional<Tensor> order,
                                                  std::optional<Tensor> groups) {
  Call call("varlen_cross_attention");
  prepare(call, q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
          {scale, dropout_p, rng, order, groups});
  auto result = new_outputs(call.p, q, q.size(0));
  call.forward();
  return result;
}

template <class Call>
std::tuple<Tensor, Tensor> varlen_cross_attention_backward(
    Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse, Tensor cu_seqlens_q,
    Tensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, double dropout_p,
    std::optional<Tensor> rng, std::optional<Tensor> order, std::optional<Tensor> groups) {
  Call call("varlen_cross_attention_backward");
  prepare(call, q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
          {scale, dropout_p, rng, order, groups});
  call.set_saved(dout, out, lse, q);
  auto gradients = new_q_kv_gradients(call.p, q, kv);
  call.backward();
  return gradients;
}

// For STABLE_TORCH_LIBRARY_IMPL, whose `m` is of a type that PyTorch does not name in public.
template <class Call, class Library>
void register_attention(Library& m) {
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention<Call>));
  m.impl("varlen_attention_backward", TORCH_BOX(&varlen_attention_backward<Call>));
  m.impl("varlen_cross_attention", TORCH_BOX(&varlen_cross_attention<Call>));
  m.impl("varlen_cross_attention_backward", TORCH_BOX(&varlen_cross_attention_backward<Call>));
}

}  // namespace bert_unpad
