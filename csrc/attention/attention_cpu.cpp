// CPU bindings of variable-length attention: checks, task list, dispatch.
#include <algorithm>
#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "attention/operands.h"
#include "attention/schedule.h"
#include "checks.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/rng.h"

namespace bert_unpad {

BU_ISA_TABLE(AttentionKernels, attention_kernels)

namespace {

// Checks a cu_seqlens and returns its values.
const int32_t* check_cu_seqlens(const Tensor& cu, int64_t tokens, int64_t max_seqlen,
                                const char* op, const char* name) {
  check(cu.is_cpu(), op, ": ", name, " must be on the CPU like the data");
  check_dtype(cu, ScalarType::Int, op, name, "int32");
  check(cu.dim() == 1 && cu.size(0) >= 1, op, ": ", name, " must have shape [sequences + 1], got ",
        shape_string(cu));
  check_contiguous(cu, op, name);
  const auto* values = cu.const_data_ptr<int32_t>();
  const int64_t last = cu.size(0) - 1;
  check(values[0] == 0, op, ": ", name, " must start with 0, got ", values[0]);
  for (int64_t i = 0; i < last; ++i) {
    check(values[i + 1] >= values[i], op, ": ", name, " must not decrease, but entry ", i + 1,
          " is ", values[i + 1], " after ", values[i]);
    check(values[i + 1] - values[i] <= max_seqlen, op, ": sequence ", i, " has ",
          values[i + 1] - values[i], " tokens, more than max_seqlen = ", max_seqlen);
  }
  check(values[last] == tokens, op, ": ", name, " must end at the number of tokens, ", tokens,
        ", but ends at ", values[last]);
  return values;
}

// Checks the values of a schedule, which the CPU does not need: make_tasks sorts. A wrong one must
// not pass here and fail on a GPU.
void check_schedule_values(const std::optional<Tensor>& order, const std::optional<Tensor>& groups,
                           const int32_t* cu_q, const int32_t* cu_k, int64_t sequences,
                           const char* op) {
  if (!order) return;
  const auto* sequence = order->const_data_ptr<int32_t>();
  std::vector<char> seen(sequences);
  for (int64_t i = 0; i < sequences; ++i) {
    const int32_t b = sequence[i];
    check(b >= 0 && b < sequences && !seen[b], op, ": order must be a permutation of 0 .. ",
          sequences - 1, ", but entry ", i, " is ", b);
    seen[b] = 1;
  }
  if (!groups) return;
  int64_t i = 0;
  for (const AttentionGroup& group : read_groups(*groups, sequences, op)) {
    for (const int64_t end = i + group.sequences; i < end; ++i) {
      const int32_t b = sequence[i];
      const int32_t q_len = cu_q[b + 1] - cu_q[b], k_len = cu_k[b + 1] - cu_k[b];
      check(q_len <= group.max_q && k_len <= group.max_k, op, ": groups allows ", group.max_q,
            " queries and ", group.max_k, " keys where sequence ", b, " has ", q_len, " and ",
            k_len);
    }
  }
}

// All (sequence, head) pairs, the most work first.
std::vector<AttentionTask> make_tasks(const int32_t* cu_q, const int32_t* cu_k, int64_t sequences,
                                      int heads) {
  std::vector<int> order(sequences);
  for (int64_t i = 0; i < sequences; ++i) order[i] = static_cast<int>(i);
  const auto work = [&](int i) {
    return static_cast<int64_t>(cu_q[i + 1] - cu_q[i]) * (cu_k[i + 1] - cu_k[i]);
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return work(a) > work(b); });
  std::vector<AttentionTask> tasks;
  tasks.reserve(sequences * heads);
  for (int i : order)
    for (int h = 0; h < heads; ++h)
      tasks.push_back({i, h, cu_q[i], cu_k[i], cu_q[i + 1] - cu_q[i], cu_k[i + 1] - cu_k[i]});
  return tasks;
}

AttentionParams common(const Tensor& like, int64_t heads, int64_t head_dim, double scale,
                       double dropout_p, const std::optional<Tensor>& rng, const char* op) {
  AttentionParams p{};
  set_common(p, like, heads, head_dim, scale, dropout_p, op);
  check(head_dim >= 1 && head_dim <= 128, op, ": head_dim must be between 1 and 128, got ",
        head_dim);
  if (dropout_p > 0.0) p.rng = read_rng(rng, op);
  return p;
}

void run(const AttentionParams& p, const std::vector<AttentionTask>& tasks, bool backward) {
  const AttentionKernels& kernels = attention_kernels();
  parallel_tasks(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const AttentionTask& t = tasks[i];
    float* scratch = thread_scratch(kernels.scratch(t.q_len, t.k_len, p.head_dim, backward));
    (backward ? kernels.backward : kernels.forward)(p, t, scratch);
  });
}

std::vector<AttentionTask> self_tasks(const AttentionParams& p, const Tensor& qkv,
                                      const Tensor& cu_seqlens, int64_t max_seqlen,
                                      const std::optional<Tensor>& order,
                                      const std::optional<Tensor>& groups, const char* op) {
  const int32_t* cu = check_cu_seqlens(cu_seqlens, qkv.size(0), max_seqlen, op, "cu_seqlens");
  const int64_t sequences = cu_seqlens.size(0) - 1;
  check_schedule(order, groups, qkv, sequences, op);
  check_schedule_values(order, groups, cu, cu, sequences, op);
  return make_tasks(cu, cu, sequences, p.heads);
}

std::tuple<Tensor, Tensor> varlen_attention(Tensor qkv, Tensor cu_seqlens, int64_t max_seqlen,
                                            double scale, double dropout_p,
                                            std::optional<Tensor> rng, std::optional<Tensor> order,
                                            std::optional<Tensor> groups) {
  const char* op = "varlen_attention";
  check_qkv(qkv, op);
  AttentionParams p = common(qkv, qkv.size(2), qkv.size(3), scale, dropout_p, rng, op);
  const auto tasks = self_tasks(p, qkv, cu_seqlens, max_seqlen, order, groups, op);
  set_qkv(p, qkv);
  auto result = new_outputs(p, qkv, qkv.size(0));
  run(p, tasks, false);
  return result;
}

Tensor varlen_attention_backward(Tensor dout, Tensor qkv, Tensor out, Tensor lse, Tensor cu_seqlens,
                                 int64_t max_seqlen, double scale, double dropout_p,
                                 std::optional<Tensor> rng, std::optional<Tensor> order,
                                 std::optional<Tensor> groups) {
  const char* op = "varlen_attention_backward";
  check_qkv(qkv, op);
  AttentionParams p = common(qkv, qkv.size(2), qkv.size(3), scale, dropout_p, rng, op);
  const auto tasks = self_tasks(p, qkv, cu_seqlens, max_seqlen, order, groups, op);
  set_qkv(p, qkv);
  set_saved(p, dout, out, lse, qkv.size(0), op);
  Tensor dqkv = new_qkv_gradient(p, qkv);
  run(p, tasks, true);
  return dqkv;
}

// The task list of queries and keys with their own cu_seqlens.
std::vector<AttentionTask> cross_tasks(const AttentionParams& p, const Tensor& q, const Tensor& kv,
                                       const Tensor& cu_q, const Tensor& cu_k, int64_t max_q,
                                       int64_t max_k, const std::optional<Tensor>& order,
                                       const std::optional<Tensor>& groups, const char* op) {
  const int32_t* q_values = check_cu_seqlens(cu_q, q.size(0), max_q, op, "cu_seqlens_q");
  const int32_t* k_values = check_cu_seqlens(cu_k, kv.size(0), max_k, op, "cu_seqlens_k");
  check(cu_q.size(0) == cu_k.size(0), op, ": cu_seqlens_q and cu_seqlens_k must hold as many ",
        "sequences, got ", cu_q.size(0) - 1, " and ", cu_k.size(0) - 1);
  const int64_t sequences = cu_q.size(0) - 1;
  check_schedule(order, groups, q, sequences, op);
  check_schedule_values(order, groups, q_values, k_values, sequences, op);
  return make_tasks(q_values, k_values, sequences, p.heads);
}

std::tuple<Tensor, Tensor> varlen_cross_attention(Tensor q, Tensor kv, Tensor cu_seqlens_q,
                                                  Tensor cu_seqlens_k, int64_t max_seqlen_q,
                                                  int64_t max_seqlen_k, double scale,
                                                  double dropout_p, std::optional<Tensor> rng,
                                                  std::optional<Tensor> order,
                                                  std::optional<Tensor> groups) {
  const char* op = "varlen_cross_attention";
  check_q_kv(q, kv, op);
  AttentionParams p = common(q, q.size(1), q.size(2), scale, dropout_p, rng, op);
  const auto tasks = cross_tasks(p, q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                 order, groups, op);
  set_q_kv(p, q, kv);
  auto result = new_outputs(p, q, q.size(0));
  run(p, tasks, false);
  return result;
}

std::tuple<Tensor, Tensor> varlen_cross_attention_backward(
    Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse, Tensor cu_seqlens_q,
    Tensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, double dropout_p,
    std::optional<Tensor> rng, std::optional<Tensor> order, std::optional<Tensor> groups) {
  const char* op = "varlen_cross_attention_backward";
  check_q_kv(q, kv, op);
  AttentionParams p = common(q, q.size(1), q.size(2), scale, dropout_p, rng, op);
  const auto tasks = cross_tasks(p, q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                 order, groups, op);
  set_q_kv(p, q, kv);
  set_saved(p, dout, out, lse, q.size(0), op);
  auto gradients = new_q_kv_gradients(p, q, kv);
  run(p, tasks, true);
  return gradients;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention));
  m.impl("varlen_attention_backward", TORCH_BOX(&varlen_attention_backward));
  m.impl("varlen_cross_attention", TORCH_BOX(&varlen_cross_attention));
  m.impl("varlen_cross_attention_backward", TORCH_BOX(&varlen_cross_attention_backward));
}

}  // namespace bert_unpad
