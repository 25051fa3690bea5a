// Every operator's schema, in one place. Implementations are registered per device by
// csrc/<family>/*_cpu.cpp and *_cuda.cpp; fake kernels and autograd are Python's (bert_unpad/_ops).
//
// `rng` is an int64 tensor [2] (seed, offset) on the operator's device; it is needed where the
// dropout probability is not 0.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(bert_unpad, m) {
  m.def(
      "varlen_attention(Tensor qkv, Tensor cu_seqlens, SymInt max_seqlen, float scale, "
      "float dropout_p, Tensor? rng) -> (Tensor out, Tensor lse)");
  m.def(
      "varlen_attention_backward(Tensor dout, Tensor qkv, Tensor out, Tensor lse, "
      "Tensor cu_seqlens, SymInt max_seqlen, float scale, float dropout_p, Tensor? rng) -> Tensor");
  m.def(
      "varlen_cross_attention(Tensor q, Tensor kv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, float dropout_p, Tensor? rng) "
      "-> (Tensor out, Tensor lse)");
  m.def(
      "varlen_cross_attention_backward(Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float scale, float dropout_p, Tensor? rng) -> (Tensor dq, Tensor dkv)");
}
