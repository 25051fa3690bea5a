// From attention's tensors to a params struct: checks, strides, allocation of results. It fills the
// CPU's AttentionCpuParams and the GPU's AttentionCudaParams, whose fields have the same names.
#pragma once

#include <cmath>
#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "common/allocate.h"
#include "common/checks.h"

namespace bert_unpad {

inline void check_last_contiguous(const Tensor& t, const char* op, const char* name) {
  const int64_t last = t.dim() - 1;
  check(t.numel() == 0 || t.size(last) == 1 || t.stride(last) == 1, op, ": ", name,
        " must be contiguous in its last dimension");
  check_storage(t, op, name);
}

// Heads of queries, and of keys and values; query head h reads key head h / (q / kv).
struct AttentionHeads {
  int64_t q, kv, dim;
};

// Without `num_heads` (0) qkv has as many heads of each kind; with it all of the queries' heads
// come first, then those of the keys, then those of the values.
inline AttentionHeads check_qkv(const Tensor& qkv, int64_t num_heads, const char* op) {
  if (num_heads == 0) {
    check_shape(qkv, {-1, 3, -1, -1}, op, "qkv", "[tokens, 3, heads, head_dim]");
    check_last_contiguous(qkv, op, "qkv");
    return {qkv.size(2), qkv.size(2), qkv.size(3)};
  }
  check_shape(qkv, {-1, -1, -1}, op, "qkv", "[tokens, num_heads + 2 * kv_heads, head_dim]");
  check_last_contiguous(qkv, op, "qkv");
  const int64_t both = qkv.size(1) - num_heads;
  check(num_heads > 0 && both > 0 && both % 2 == 0 && num_heads % (both / 2) == 0, op,
        ": num_heads must be a multiple of kv_heads, and qkv must have num_heads + 2 * kv_heads "
        "heads, got num_heads = ",
        num_heads, " and qkv of shape ", ShapeOf(qkv));
  return {num_heads, both / 2, qkv.size(2)};
}

inline AttentionHeads check_q_kv(const Tensor& q, const Tensor& kv, const char* op) {
  check_shape(q, {-1, -1, -1}, op, "q", "[query tokens, heads, head_dim]");
  check_shape(kv, {-1, 2, -1, q.size(2)}, op, "kv", "[key tokens, 2, kv_heads, head_dim]");
  const int64_t heads = q.size(1), kv_heads = kv.size(2);
  check(heads == kv_heads || (kv_heads > 0 && heads % kv_heads == 0), op,
        ": the heads of q must be a multiple of those of kv, got ", heads, " and ", kv_heads);
  check(kv.scalar_type() == q.scalar_type(), op, ": kv must have the dtype of q");
  check_same_device(kv, q, op, "kv");
  check_last_contiguous(q, op, "q");
  check_last_contiguous(kv, op, "kv");
  return {heads, kv_heads, q.size(2)};
}

// One side's tokens, queries or keys, and the sequences that they are packed from.
struct AttentionRows {
  const Tensor& data;
  const char* data_name;
  const Tensor& cu_seqlens;
  const char* cu_name;
  int64_t max_seqlen;
};

// Checks both sides' cu_seqlens but for device and values; returns how many sequences they hold.
inline int64_t check_sequences(const AttentionRows& q, const AttentionRows& k, const char* op) {
  for (const AttentionRows* rows : {&q, &k}) {
    const Tensor& cu = rows->cu_seqlens;
    check_dtype(cu, ScalarType::Int, op, rows->cu_name, "int32");
    check(cu.dim() == 1 && cu.size(0) >= 1, op, ": ", rows->cu_name,
          " must have shape [sequences + 1], got ", ShapeOf(cu));
    check_contiguous(cu, op, rows->cu_name);
  }
  const int64_t sequences = q.cu_seqlens.size(0) - 1;
  check(k.cu_seqlens.size(0) - 1 == sequences, op, ": ", q.cu_name, " and ", k.cu_name,
        " must hold as many sequences, got ", sequences, " and ", k.cu_seqlens.size(0) - 1);
  return sequences;
}

inline Packed<const void> packed(const Tensor& t, int64_t token_stride, int64_t head_stride,
                                 int64_t offset = 0) {
  const auto* base = static_cast<const char*>(t.const_data_ptr());
  return {base + offset * (t.scalar_type() == ScalarType::Float ? 4 : 2), token_stride,
          head_stride};
}
inline Packed<void> writable(const Tensor& t, int64_t token_stride, int64_t head_stride,
                             int64_t offset = 0) {
  const Packed<const void> p = packed(t, token_stride, head_stride, offset);
  return {const_cast<void*>(p.p), token_stride, head_stride};
}

// What the four operators have in common: everything but pointers and random numbers.
template <class Params>
void set_common(Params& p, const Tensor& like, int64_t heads, int64_t head_dim, double scale,
                double dropout_p, const char* op) {
  p.dtype = storage_dtype(like, op, "the input");
  check_probability(dropout_p, op, "dropout_p");
  p.heads = static_cast<int>(heads);
  p.head_dim = static_cast<int>(head_dim);
  p.scale = static_cast<float>(scale);
  check(std::isfinite(p.scale) && p.scale != 0.0f, op, ": scale must be finite and not 0, got ",
        scale);
  p.keep_threshold = keep_threshold(dropout_p);
}

template <class Params>
void set_qkv(Params& p, const Tensor& qkv, const AttentionHeads& heads) {
  const int64_t head_stride = qkv.stride(qkv.dim() - 2);
  const bool grouped = qkv.dim() == 3;
  const int64_t k = grouped ? heads.q * head_stride : qkv.stride(1);
  const int64_t v = grouped ? (heads.q + heads.kv) * head_stride : 2 * qkv.stride(1);
  p.q = packed(qkv, qkv.stride(0), head_stride);
  p.k = packed(qkv, qkv.stride(0), head_stride, k);
  p.v = packed(qkv, qkv.stride(0), head_stride, v);
}

template <class Params>
void set_q_kv(Params& p, const Tensor& q, const Tensor& kv) {
  p.q = packed(q, q.stride(0), q.stride(1));
  p.k = packed(kv, kv.stride(0), kv.stride(2));
  p.v = packed(kv, kv.stride(0), kv.stride(2), kv.stride(1));
}

// The forward pass's results, as the backward pass gets them; dout may have any outer strides.
template <class Params>
void set_saved(Params& p, const Tensor& dout, const Tensor& out, const Tensor& lse, int64_t tokens,
               const char* op) {
  check_shape(out, {tokens, p.heads, p.head_dim}, op, "out", "[tokens, heads, head_dim]");
  check_shape(dout, {tokens, p.heads, p.head_dim}, op, "dout", "[tokens, heads, head_dim]");
  check(dout.scalar_type() == out.scalar_type(), op, ": dout must have the dtype of out");
  check(storage_dtype(out, op, "out") == p.dtype, op, ": out must have the dtype of the input");
  check_shape(lse, {p.heads, tokens}, op, "lse", "[heads, tokens]");
  check_dtype(lse, ScalarType::Float, op, "lse", "float32");
  check_contiguous(lse, op, "lse");
  check_last_contiguous(out, op, "out");
  check_last_contiguous(dout, op, "dout");
  p.out = packed(out, out.stride(0), out.stride(1));
  p.dout = packed(dout, dout.stride(0), dout.stride(1));
  p.lse = const_cast<float*>(lse.const_data_ptr<float>());
  p.q_tokens = tokens;
}

// Allocates out and lse.
template <class Params>
std::tuple<Tensor, Tensor> new_outputs(Params& p, const Tensor& like, int64_t tokens) {
  Tensor out = allocate(like, {tokens, p.heads, p.head_dim});
  Tensor lse = allocate(like, {p.heads, tokens}, ScalarType::Float);
  p.out_w = writable(out, static_cast<int64_t>(p.heads) * p.head_dim, p.head_dim);
  p.lse = lse.mutable_data_ptr<float>();
  p.q_tokens = tokens;
  return {out, lse};
}

// Contiguous, of the shape of qkv.
template <class Params>
Tensor new_qkv_gradient(Params& p, const Tensor& qkv, const AttentionHeads& heads) {
  const int64_t row = (heads.q + 2 * heads.kv) * heads.dim;
  Tensor dqkv = qkv.dim() == 3 ? allocate(qkv, {qkv.size(0), qkv.size(1), heads.dim})
                               : allocate(qkv, {qkv.size(0), 3, heads.q, heads.dim});
  p.dq = writable(dqkv, row, heads.dim);
  p.dk = writable(dqkv, row, heads.dim, heads.q * heads.dim);
  p.dv = writable(dqkv, row, heads.dim, (heads.q + heads.kv) * heads.dim);
  return dqkv;
}

template <class Params>
std::tuple<Tensor, Tensor> new_q_kv_gradients(Params& p, const Tensor& q, const Tensor& kv,
                                              const AttentionHeads& heads) {
  Tensor dq = allocate(q, {q.size(0), heads.q, heads.dim});
  Tensor dkv = allocate(kv, {kv.size(0), 2, heads.kv, heads.dim});
  p.dq = writable(dq, heads.q * heads.dim, heads.dim);
  p.dk = writable(dkv, 2 * heads.kv * heads.dim, heads.dim);
  p.dv = writable(dkv, 2 * heads.kv * heads.dim, heads.dim, heads.kv * heads.dim);
  return {dq, dkv};
}

// `order` and `groups`: in which order a GPU starts the sequences. Long ones first, so that short
// ones fill the end of the launch. `order` lists the sequences; `groups` cuts that list into at
// most 4 runs of similar length, each with its own launch and a grid no larger than its longest
// sequence needs. The values of `order` stay on the data's device, so only its type is checked
// here, and its values where they are used; `groups` is host memory and checked fully. Where
// queries are the keys, `order` may be [sequences, kOrderColumns]: also each sequence's first
// token, its length and 0, so that a block finds its work in one load; one block of a sequence
// compares them with cu_seqlens.
inline constexpr int64_t kOrderColumns = 4;

inline void check_schedule(const std::optional<Tensor>& order, const std::optional<Tensor>& groups,
                           const AttentionRows& q, const AttentionRows& k, int64_t sequences,
                           const char* op) {
  const Tensor& data = q.data;
  check(order || !groups, op, ": groups cuts order into runs, so it needs order");
  if (order) {
    const bool itself = q.cu_seqlens.const_data_ptr() == k.cu_seqlens.const_data_ptr();
    const bool table = itself && order->dim() == 2 && order->size(1) == kOrderColumns;
    check((order->dim() == 1 || table) && order->size(0) == sequences, op,
          ": order must have shape [", sequences, "], one entry a sequence, got ", ShapeOf(*order));
    check_dtype(*order, ScalarType::Int, op, "order", "int32");
    check_contiguous(*order, op, "order");
    check_same_device(*order, data, op, "order");
  }
  if (groups) {
    check(groups->dim() == 2 && groups->size(0) >= 1 && groups->size(0) <= kMaxAttentionGroups &&
              groups->size(1) == 3,
          op, ": groups must have shape [1 to ", kMaxAttentionGroups,
          ", 3] (sequences, longest query run, longest key run), got ", ShapeOf(*groups));
    check_dtype(*groups, ScalarType::Int, op, "groups", "int32");
    check(groups->is_cpu(), op, ": groups must be on the CPU");
    check_contiguous(*groups, op, "groups");
  }
}

// The rows of `groups`, which check_schedule has passed.
inline std::vector<AttentionGroup> read_groups(const Tensor& groups, int64_t sequences,
                                               const char* op) {
  std::vector<AttentionGroup> result;
  const auto* values = groups.const_data_ptr<int32_t>();
  int64_t total = 0;
  for (int64_t g = 0; g < groups.size(0); ++g) {
    const int32_t* row = values + 3 * g;
    check(row[0] >= 0 && row[1] >= 0 && row[2] >= 0, op, ": groups must not be negative, but row ",
          g, " is [", row[0], ", ", row[1], ", ", row[2], "]");
    result.push_back({row[0], row[1], row[2]});
    total += row[0];
  }
  check(total == sequences, op, ": the groups' sequences must add up to ", sequences, ", got ",
        total);
  return result;
}

}  // namespace bert_unpad
