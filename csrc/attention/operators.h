// The four attention operators, from their arguments to one call of a device's kernels.
//
// Each device has a class `Call` (in attention_cpu.cpp and attention_cuda.cpp) with
//   Call(op)                         has the public members `op` and `p`, the params struct
//   set_model(like, heads, settings)
//   set_sequences(q, k, settings)    checks both sides' sequences against the rows in `p`
//   set_positions(q, k, settings)    window, query positions and position bias
//   set_saved(dout, out, lse, q)     the results of forward; q: a tensor of the queries' rows
//   forward()                        runs the kernels on `p`
//   backward(like, settings)         the same; returns the gradients of table, query and key of
//                                    the position bias, empty [0] where there is none
#pragma once

#include <optional>
#include <tuple>

#include "attention/arguments.h"
#include "attention/position_arguments.h"

namespace bert_unpad {

using OptionalTensor = std::optional<Tensor>;

// The arguments that all four have.
struct AttentionSettings {
  double scale, dropout_p;
  const OptionalTensor &rng, &order, &groups;
  int64_t window_left, window_right;
  const OptionalTensor& query_positions;
  BiasArguments bias;
  bool table_gradient;  // of the backward pass: whether the table's gradient is needed
};

using BiasGradients = std::tuple<Tensor, Tensor, Tensor>;

template <class Call>
AttentionHeads prepare(Call& call, const Tensor& qkv, int64_t num_heads, const Tensor& cu_seqlens,
                       int64_t max_seqlen, const AttentionSettings& settings) {
  const AttentionHeads heads = check_qkv(qkv, num_heads, call.op);
  call.set_model(qkv, heads, settings);
  set_qkv(call.p, qkv, heads);
  const AttentionRows rows{qkv, "qkv", cu_seqlens, "cu_seqlens", max_seqlen};
  call.set_sequences(rows, rows, settings);
  call.set_positions(qkv, qkv, settings);
  return heads;
}

template <class Call>
AttentionHeads prepare(Call& call, const Tensor& q, const Tensor& kv, const Tensor& cu_q,
                       const Tensor& cu_k, int64_t max_q, int64_t max_k,
                       const AttentionSettings& settings) {
  const AttentionHeads heads = check_q_kv(q, kv, call.op);
  call.set_model(q, heads, settings);
  set_q_kv(call.p, q, kv);
  call.set_sequences({q, "q", cu_q, "cu_seqlens_q", max_q}, {kv, "kv", cu_k, "cu_seqlens_k", max_k},
                     settings);
  call.set_positions(q, kv, settings);
  return heads;
}

template <class Call>
std::tuple<Tensor, Tensor> varlen_attention(Tensor qkv, Tensor cu_seqlens, int64_t max_seqlen,
                                            double scale, double dropout_p, OptionalTensor rng,
                                            OptionalTensor order, OptionalTensor groups,
                                            int64_t num_heads, int64_t window_left,
                                            int64_t window_right, OptionalTensor bias_buckets,
                                            OptionalTensor bias_table, OptionalTensor bias_query,
                                            OptionalTensor bias_key) {
  Call call("varlen_attention");
  prepare(call, qkv, num_heads, cu_seqlens, max_seqlen,
          {scale,
           dropout_p,
           rng,
           order,
           groups,
           window_left,
           window_right,
           std::nullopt,
           {bias_buckets, bias_table, bias_query, bias_key},
           false});
  auto result = new_outputs(call.p, qkv, qkv.size(0));
  call.forward();
  return result;
}

template <class Call>
std::tuple<Tensor, Tensor, Tensor, Tensor> varlen_attention_backward(
    Tensor dout, Tensor qkv, Tensor out, Tensor lse, Tensor cu_seqlens, int64_t max_seqlen,
    double scale, double dropout_p, OptionalTensor rng, OptionalTensor order, OptionalTensor groups,
    int64_t num_heads, int64_t window_left, int64_t window_right, OptionalTensor bias_buckets,
    OptionalTensor bias_table, OptionalTensor bias_query, OptionalTensor bias_key,
    bool table_gradient) {
  Call call("varlen_attention_backward");
  const AttentionSettings settings{
      scale,         dropout_p,    rng,
      order,         groups,       window_left,
      window_right,  std::nullopt, {bias_buckets, bias_table, bias_query, bias_key},
      table_gradient};
  const auto heads = prepare(call, qkv, num_heads, cu_seqlens, max_seqlen, settings);
  call.set_saved(dout, out, lse, qkv);
  Tensor dqkv = new_qkv_gradient(call.p, qkv, heads);
  return std::tuple_cat(std::tuple(dqkv), call.backward(qkv, settings));
}

template <class Call>
std::tuple<Tensor, Tensor> varlen_cross_attention(
    Tensor q, Tensor kv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int64_t max_seqlen_q,
    int64_t max_seqlen_k, double scale, double dropout_p, OptionalTensor rng, OptionalTensor order,
    OptionalTensor groups, int64_t window_left, int64_t window_right,
    OptionalTensor query_positions, OptionalTensor bias_buckets, OptionalTensor bias_table,
    OptionalTensor bias_query, OptionalTensor bias_key) {
  Call call("varlen_cross_attention");
  prepare(call, q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
          {scale,
           dropout_p,
           rng,
           order,
           groups,
           window_left,
           window_right,
           query_positions,
           {bias_buckets, bias_table, bias_query, bias_key},
           false});
  auto result = new_outputs(call.p, q, q.size(0));
  call.forward();
  return result;
}

template <class Call>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> varlen_cross_attention_backward(
    Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse, Tensor cu_seqlens_q,
    Tensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, double dropout_p,
    OptionalTensor rng, OptionalTensor order, OptionalTensor groups, int64_t window_left,
    int64_t window_right, OptionalTensor query_positions, OptionalTensor bias_buckets,
    OptionalTensor bias_table, OptionalTensor bias_query, OptionalTensor bias_key,
    bool table_gradient) {
  Call call("varlen_cross_attention_backward");
  const AttentionSettings settings{
      scale,         dropout_p,       rng,
      order,         groups,          window_left,
      window_right,  query_positions, {bias_buckets, bias_table, bias_query, bias_key},
      table_gradient};
  const auto heads =
      prepare(call, q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, settings);
  call.set_saved(dout, out, lse, q);
  auto gradients = new_q_kv_gradients(call.p, q, kv, heads);
  return std::tuple_cat(gradients, call.backward(q, settings));
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
