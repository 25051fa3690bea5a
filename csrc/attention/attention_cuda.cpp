// Variable-length attention on a GPU: checks, aligned copies, stream.
#include "attention/attention_cuda.h"
#include "common/allocate.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "attention/cu_seqlens_errors.h"
#include "attention/operators.h"
#include "cuda/binding.h"

namespace bert_unpad::cuda {
namespace {

// Checks one side's sequences; the values of cu_seqlens are on the device, where the kernels check
// them.
const int32_t* check_cu_seqlens(const AttentionRows& rows, const char* op) {
  const char* name = rows.cu_name;
  const int64_t tokens = rows.data.size(0), longest = rows.max_seqlen;
  check_same_device(rows.cu_seqlens, rows.data, op, name);
  check(longest >= 0 && longest <= INT32_MAX, op, ": max_seqlen of ", name,
        " must be between 0 and 2^31 - 1, got ", longest);
  check(tokens <= INT32_MAX, op, ": at most 2^31 - 1 tokens, got ", tokens);
  check(rows.cu_seqlens.size(0) > 1 || tokens == 0, op, ": ", name, " " BU_CU_SEQLENS_END ", ",
        tokens, ", but holds no sequence");
  check(longest > 0 || tokens == 0, op, ": ", name, " " BU_CU_SEQLENS_LONGEST ", 0, but there are ",
        tokens, " tokens");
  return rows.cu_seqlens.const_data_ptr<int32_t>();
}

bool rows_are_aligned(const Packed<const void>& rows, DType dtype) {
  const int64_t bytes = element_size(dtype);
  return reinterpret_cast<uintptr_t>(rows.p) % 16 == 0 && rows.token_stride * bytes % 16 == 0 &&
         rows.head_stride * bytes % 16 == 0;
}

// One call of an operator; see operators.h.
class CudaAttention {
 public:
  const char* op;
  AttentionCudaParams p{};

  explicit CudaAttention(const char* name) : op(name) {}

  void set_model(const Tensor& like, const AttentionHeads& heads,
                 const AttentionSettings& settings) {
    set_common(p, like, heads.q, heads.dim, settings.scale, settings.dropout_p, op);
    check(heads.dim == 32 || heads.dim == 64 || heads.dim == 96 || heads.dim == 128, op,
          ": head_dim must be 32, 64, 96 or 128 on a GPU, got ", heads.dim);
    p.kv_heads = static_cast<int>(heads.kv);
    p.rng = rng_pointer(settings.rng, settings.dropout_p, like, op);
  }

  // Also makes the data's device current for the rest of the call.
  void set_sequences(const AttentionRows& q, const AttentionRows& k,
                     const AttentionSettings& settings) {
    const int64_t sequences = check_sequences(q, k, op);
    p.cu_q = check_cu_seqlens(q, op);
    p.cu_k = check_cu_seqlens(k, op);
    check(sequences <= INT32_MAX, op, ": at most 2^31 - 1 sequences, got ", sequences);
    p.sequences = static_cast<int>(sequences);
    p.q_tokens = q.data.size(0);
    p.k_tokens = k.data.size(0);
    p.max_q = static_cast<int>(q.max_seqlen);
    p.max_k = static_cast<int>(k.max_seqlen);
    check_aligned(p.q, q.data_name);
    for (const auto* rows : {&p.k, &p.v}) check_aligned(*rows, k.data_name);
    check_schedule(settings.order, settings.groups, q, k, sequences, op);
    if (settings.order) {
      p.order = settings.order->const_data_ptr<int32_t>();
      p.order_columns = static_cast<int>(settings.order->dim() == 2 ? kOrderColumns : 1);
      check(p.order_columns == 1 || reinterpret_cast<uintptr_t>(p.order) % 16 == 0, op,
            ": order must begin at a multiple of 16 bytes");
    }
    if (settings.groups) groups_ = read_groups(*settings.groups, sequences, op);
    device_.emplace(q.data, op);
  }

  void set_positions(const Tensor& q, const Tensor& k, const AttentionSettings& settings) {
    p.window = checked_window(settings.window_left, settings.window_right, op);
    check_query_positions(settings.query_positions, q, op);
    if (settings.query_positions)
      p.query_positions = settings.query_positions->const_data_ptr<int32_t>();
    if (check_bias(settings.bias, q, k, p.heads, op)) set_bias(settings.bias, q);
  }

  void set_saved(const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& q) {
    for (const auto& [t, name] : {std::pair{&dout, "dout"}, {&out, "out"}, {&lse, "lse"}})
      check_same_device(*t, q, op, name);
    bert_unpad::set_saved(p, dout, out, lse, q.size(0), op);
    p.delta = workspace(lse, {p.heads, p.q_tokens});
    p.dout = aligned(dout, p.dout);
    p.out = aligned(out, p.out);
  }

  void forward() const { attention_forward(p, bias_, groups_, device_->stream); }

  BiasGradients backward(const Tensor& like, const AttentionSettings& settings) {
    const BiasArguments& bias = settings.bias;
    Tensor dquery = bias_gradient(bias.query, like, bias_.dquery, bias_.dquery_sums);
    Tensor dkey = bias_gradient(bias.key, like, bias_.dkey, bias_.dkey_sums);
    const bool table = bias.table && settings.table_gradient;
    Tensor dtable = table ? allocate(*bias.table, {bias_.buckets, p.heads}) : allocate(like, {0});
    if (table) {
      bias_.dtable = dtable.mutable_data_ptr<float>();
      bias_.dtable_parts = workspace(like, {bias_parts(p.q_tokens), bias_.buckets, p.heads});
      if (!bias.query) bias_.dquery_sums = workspace(like, {p.q_tokens, p.heads, bias_.buckets});
    }
    if (const int64_t sums = attention_query_sums(p, bias_)) p.dq_sums = workspace(like, {sums});
    attention_backward(p, bias_, groups_, device_->stream);
    return {dtable, dquery, dkey};
  }

 private:
  AttentionCudaBias bias_{};
  std::vector<AttentionGroup> groups_;
  std::optional<Call> device_;
  std::vector<Tensor> workspace_;  // kept until the kernels have been started

  void check_aligned(const Packed<const void>& rows, const char* name) const {
    check(rows_are_aligned(rows, p.dtype), op, ": every row of ", name,
          " must begin at a multiple of 16 bytes; use a contiguous copy");
  }

  // Uninitialised memory of the call, fp32.
  float* workspace(const Tensor& like, std::vector<int64_t> shape) {
    workspace_.push_back(allocate(like, shape, ScalarType::Float));
    return workspace_.back().mutable_data_ptr<float>();
  }

  // The values of the buckets are on the device, where a kernel checks them.
  void set_bias(const BiasArguments& bias, const Tensor& like) {
    const int64_t distances = bias.buckets->size(0);
    check(p.k_tokens + distances <= INT32_MAX - 64, op,
          ": with a position bias at most 2^31 - 65 tokens and entries of bias_buckets together, "
          "got ",
          p.k_tokens, " and ", distances);
    set_bias_parts(bias_, bias);
    if (!bias.table) return;
    bias_.table = bias.table->const_data_ptr<float>();
    bias_.distances = workspace(like, {p.heads, distances});
  }

  // Of `rows`, which query or key may be; where the sums in fp32 are another tensor, a workspace.
  Tensor bias_gradient(const OptionalTensor& rows, const Tensor& like, void*& out, float*& sums) {
    if (!rows) return allocate(like, {0});
    const std::vector<int64_t> shape{rows->size(0), p.heads, bias_.buckets};
    Tensor gradient = allocate(*rows, shape);
    out = gradient.mutable_data_ptr();
    sums = p.dtype == DType::kFloat32 ? static_cast<float*>(out) : workspace(like, shape);
    return gradient;
  }

  // A gradient that autograd made may lie anywhere; its caller could not do anything about it.
  Packed<const void> aligned(const Tensor& t, const Packed<const void>& rows) {
    if (rows_are_aligned(rows, p.dtype)) return rows;
    Tensor copy = allocate(t, {t.size(0), t.size(1), t.size(2)});
    torch::stable::copy_(copy, t);
    workspace_.push_back(copy);
    return packed(copy, copy.stride(0), copy.stride(1));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) { register_attention<CudaAttention>(m); }

}  // namespace bert_unpad::cuda
