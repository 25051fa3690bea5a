// CUDA bindings of variable-length attention: checks, results, stream.
#include "attention/attention_cuda.h"

#include <tuple>
#include <vector>

#include "attention/operands.h"
#include "attention/schedule.h"
#include "cuda/binding.h"

namespace bert_unpad::cuda {
namespace {

// One side's packing: its values are on the device, where the kernels check them.
const int32_t* check_cu_seqlens(const Tensor& cu, const Tensor& data, int64_t tokens,
                                int64_t max_seqlen, const char* op, const char* name) {
  check_dtype(cu, ScalarType::Int, op, name, "int32");
  check(cu.dim() == 1 && cu.size(0) >= 1, op, ": ", name, " must have shape [sequences + 1], got ",
        shape_string(cu));
  check_contiguous(cu, op, name);
  check_same_device(cu, data, op, name);
  check(max_seqlen >= 0 && max_seqlen <= INT32_MAX, op, ": max_seqlen of ", name,
        " must be between 0 and 2^31 - 1, got ", max_seqlen);
  check(tokens <= INT32_MAX, op, ": at most 2^31 - 1 tokens, got ", tokens);
  check(cu.size(0) > 1 || tokens == 0, op, ": ", name, " holds no sequence, but there are ", tokens,
        " tokens");
  check(max_seqlen > 0 || tokens == 0, op, ": max_seqlen of ", name, " is 0, but there are ",
        tokens, " tokens");
  return cu.const_data_ptr<int32_t>();
}

AttentionArgs common(const Tensor& like, int64_t heads, int64_t head_dim, double scale,
                     double dropout_p, const std::optional<Tensor>& rng, const char* op) {
  AttentionArgs p{};
  set_common(p, like, heads, head_dim, scale, dropout_p, op);
  check(head_dim == 32 || head_dim == 64 || head_dim == 128, op,
        ": head_dim must be 32, 64 or 128 on a GPU, got ", head_dim);
  p.rng = rng_pointer(rng, dropout_p, like, op);
  return p;
}

bool rows_are_aligned(const Packed<const void>& rows, DType dtype) {
  const int64_t bytes = element_size(dtype);
  return reinterpret_cast<uintptr_t>(rows.p) % 16 == 0 && rows.token_stride * bytes % 16 == 0 &&
         rows.head_stride * bytes % 16 == 0;
}

void check_aligned(const AttentionArgs& p, const Packed<const void>& rows, const char* op,
                   const char* name) {
  check(rows_are_aligned(rows, p.dtype), op, ": every row of ", name,
        " must begin at a multiple of 16 bytes; use a contiguous copy");
}

// The sequences of queries and keys, and how they are started.
std::vector<AttentionGroup> set_sequences(AttentionArgs& p, const Tensor& q, const Tensor& cu_q,
                                          int64_t max_q, const char* q_name, const Tensor& k,
                                          const Tensor& cu_k, int64_t max_k, const char* k_name,
                                          const std::optional<Tensor>& order,
                                          const std::optional<Tensor>& groups, const char* op) {
  p.cu_q = check_cu_seqlens(cu_q, q, q.size(0), max_q, op, q_name);
  p.cu_k = check_cu_seqlens(cu_k, k, k.size(0), max_k, op, k_name);
  check(cu_q.size(0) == cu_k.size(0), op, ": ", q_name, " and ", k_name, " must hold as many ",
        "sequences, got ", cu_q.size(0) - 1, " and ", cu_k.size(0) - 1);
  const int64_t sequences = cu_q.size(0) - 1;
  check(sequences <= INT32_MAX, op, ": at most 2^31 - 1 sequences, got ", sequences);
  p.sequences = static_cast<int>(sequences);
  p.q_tokens = q.size(0);
  p.k_tokens = k.size(0);
  p.max_q = static_cast<int>(max_q);
  p.max_k = static_cast<int>(max_k);
  check_schedule(order, groups, q, sequences, op);
  if (order) p.order = order->const_data_ptr<int32_t>();
  return groups ? read_groups(*groups, sequences, op) : std::vector<AttentionGroup>();
}

// A gradient that autograd made may lie anywhere; its caller could not do anything about it.
Tensor aligned(const AttentionArgs& p, const Tensor& t) {
  if (rows_are_aligned({t.const_data_ptr(), t.stride(0), t.stride(1)}, p.dtype)) return t;
  Tensor copy = torch::stable::new_empty(t, {t.size(0), t.size(1), t.size(2)});
  torch::stable::copy_(copy, t);
  return copy;
}

std::tuple<Tensor, Tensor> varlen_attention(Tensor qkv, Tensor cu_seqlens, int64_t max_seqlen,
                                            double scale, double dropout_p,
                                            std::optional<Tensor> rng, std::optional<Tensor> order,
                                            std::optional<Tensor> groups) {
  const char* op = "varlen_attention";
  check_qkv(qkv, op);
  AttentionArgs p = common(qkv, qkv.size(2), qkv.size(3), scale, dropout_p, rng, op);
  const auto runs = set_sequences(p, qkv, cu_seqlens, max_seqlen, "cu_seqlens", qkv, cu_seqlens,
                                  max_seqlen, "cu_seqlens", order, groups, op);
  set_qkv(p, qkv);
  for (const auto* rows : {&p.q, &p.k, &p.v}) check_aligned(p, *rows, op, "qkv");
  const Call call(qkv, op);
  auto result = new_outputs(p, qkv, qkv.size(0));
  attention_forward(p, runs, call.stream);
  return result;
}

Tensor varlen_attention_backward(Tensor dout, Tensor qkv, Tensor out, Tensor lse, Tensor cu_seqlens,
                                 int64_t max_seqlen, double scale, double dropout_p,
                                 std::optional<Tensor> rng, std::optional<Tensor> order,
                                 std::optional<Tensor> groups) {
  const char* op = "varlen_attention_backward";
  check_qkv(qkv, op);
  AttentionArgs p = common(qkv, qkv.size(2), qkv.size(3), scale, dropout_p, rng, op);
  const auto runs = set_sequences(p, qkv, cu_seqlens, max_seqlen, "cu_seqlens", qkv, cu_seqlens,
                                  max_seqlen, "cu_seqlens", order, groups, op);
  set_qkv(p, qkv);
  for (const auto* rows : {&p.q, &p.k, &p.v}) check_aligned(p, *rows, op, "qkv");
  const Call call(qkv, op);
  for (const auto& [t, name] : {std::pair{&dout, "dout"}, {&out, "out"}, {&lse, "lse"}})
    check_same_device(*t, qkv, op, name);
  set_saved(p, dout, out, lse, qkv.size(0), op);
  const Tensor dout_rows = aligned(p, dout), out_rows = aligned(p, out);
  set_saved(p, dout_rows, out_rows, lse, qkv.size(0), op);
  Tensor dqkv = new_qkv_gradient(p, qkv);
  Tensor delta = torch::stable::new_empty(lse, {p.heads, p.q_tokens});
  p.delta = delta.mutable_data_ptr<float>();
  attention_backward(p, runs, call.stream);
  return dqkv;
}

AttentionArgs cross_args(const Tensor& q, const Tensor& kv, double scale, double dropout_p,
                         const std::optional<Tensor>& rng, const char* op) {
  check_q_kv(q, kv, op);
  AttentionArgs p = common(q, q.size(1), q.size(2), scale, dropout_p, rng, op);
  set_q_kv(p, q, kv);
  check_aligned(p, p.q, op, "q");
  for (const auto* rows : {&p.k, &p.v}) check_aligned(p, *rows, op, "kv");
  return p;
}

std::tuple<Tensor, Tensor> varlen_cross_attention(Tensor q, Tensor kv, Tensor cu_seqlens_q,
                                                  Tensor cu_seqlens_k, int64_t max_seqlen_q,
                                                  int64_t max_seqlen_k, double scale,
                                                  double dropout_p, std::optional<Tensor> rng,
                                                  std::optional<Tensor> order,
                                                  std::optional<Tensor> groups) {
  const char* op = "varlen_cross_attention";
  AttentionArgs p = cross_args(q, kv, scale, dropout_p, rng, op);
  const auto runs = set_sequences(p, q, cu_seqlens_q, max_seqlen_q, "cu_seqlens_q", kv,
                                  cu_seqlens_k, max_seqlen_k, "cu_seqlens_k", order, groups, op);
  const Call call(q, op);
  auto result = new_outputs(p, q, q.size(0));
  attention_forward(p, runs, call.stream);
  return result;
}

std::tuple<Tensor, Tensor> varlen_cross_attention_backward(
    Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse, Tensor cu_seqlens_q,
    Tensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, double dropout_p,
    std::optional<Tensor> rng, std::optional<Tensor> order, std::optional<Tensor> groups) {
  const char* op = "varlen_cross_attention_backward";
  AttentionArgs p = cross_args(q, kv, scale, dropout_p, rng, op);
  const auto runs = set_sequences(p, q, cu_seqlens_q, max_seqlen_q, "cu_seqlens_q", kv,
                                  cu_seqlens_k, max_seqlen_k, "cu_seqlens_k", order, groups, op);
  const Call call(q, op);
  for (const auto& [t, name] : {std::pair{&dout, "dout"}, {&out, "out"}, {&lse, "lse"}})
    check_same_device(*t, q, op, name);
  set_saved(p, dout, out, lse, q.size(0), op);
  const Tensor dout_rows = aligned(p, dout), out_rows = aligned(p, out);
  set_saved(p, dout_rows, out_rows, lse, q.size(0), op);
  auto gradients = new_q_kv_gradients(p, q, kv);
  Tensor delta = torch::stable::new_empty(lse, {p.heads, p.q_tokens});
  p.delta = delta.mutable_data_ptr<float>();
  attention_backward(p, runs, call.stream);
  return gradients;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention));
  m.impl("varlen_attention_backward", TORCH_BOX(&varlen_attention_backward));
  m.impl("varlen_cross_attention", TORCH_BOX(&varlen_cross_attention));
  m.impl("varlen_cross_attention_backward", TORCH_BOX(&varlen_cross_attention_backward));
}

}  // namespace bert_unpad::cuda
