// Variable-length attention on the CPU: checks, task list, dispatch.
#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "attention/operators.h"
#include "common/checks.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/rng.h"

namespace bert_unpad {

BU_ISA_TABLE(AttentionKernels, attention_kernels)
BU_BF16_TABLE(AttentionKernels, attention_bf16_kernels)

namespace {

const AttentionKernels& kernels_for(DType dtype) {
  const bool by_bf16 = isa() == Isa::kAmx || fast_bf16_dot_products();
  return dtype == DType::kBFloat16 && by_bf16 ? *attention_bf16_kernels() : attention_kernels();
}

// Checks the values of a cu_seqlens and returns them.
const int32_t* check_cu_seqlens(const AttentionRows& rows, const char* op) {
  const char* name = rows.cu_name;
  const auto* values = rows.cu_seqlens.const_data_ptr<int32_t>();
  const int64_t tokens = rows.data.size(0), last = rows.cu_seqlens.size(0) - 1;
  check(values[0] == 0, op, ": ", name, " must start with 0, got ", values[0]);
  for (int64_t i = 0; i < last; ++i) {
    check(values[i + 1] >= values[i], op, ": ", name, " must not decrease, but entry ", i + 1,
          " is ", values[i + 1], " after ", values[i]);
    check(values[i + 1] - values[i] <= rows.max_seqlen, op, ": sequence ", i, " has ",
          values[i + 1] - values[i], " tokens, more than max_seqlen = ", rows.max_seqlen);
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

// One call of an operator; see operators.h.
class CpuAttention {
 public:
  const char* op;
  AttentionCpuParams p{};

  explicit CpuAttention(const char* name) : op(name) {}

  void set_model(const Tensor& like, int64_t heads, int64_t head_dim,
                 const AttentionSettings& settings) {
    set_common(p, like, heads, head_dim, settings.scale, settings.dropout_p, op);
    check(head_dim >= 1 && head_dim <= 128, op, ": head_dim must be between 1 and 128, got ",
          head_dim);
    if (settings.dropout_p > 0.0) p.rng = read_rng(settings.rng, op);
  }

  void set_sequences(const AttentionRows& q, const AttentionRows& k,
                     const AttentionSettings& settings) {
    for (const AttentionRows* rows : {&q, &k})
      check(rows->cu_seqlens.is_cpu(), op, ": ", rows->cu_name,
            " must be on the CPU like the data");
    const int64_t sequences = check_sequences(q, k, op);
    const int32_t *cu_q = check_cu_seqlens(q, op), *cu_k = check_cu_seqlens(k, op);
    check_schedule(settings.order, settings.groups, q.data, sequences, op);
    check_schedule_values(settings.order, settings.groups, cu_q, cu_k, sequences, op);
    tasks_ = make_tasks(cu_q, cu_k, sequences, p.heads);
  }

  void set_saved(const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& q) {
    bert_unpad::set_saved(p, dout, out, lse, q.size(0), op);
  }

  void forward() const { run(false); }
  void backward() const { run(true); }

 private:
  std::vector<AttentionTask> tasks_;

  void run(bool backward) const {
    const AttentionKernels& kernels = kernels_for(p.dtype);
    const auto kernel = backward ? kernels.backward : kernels.forward;
    parallel_tasks(static_cast<int64_t>(tasks_.size()), [&](int64_t i) {
      const AttentionTask& t = tasks_[i];
      kernel(p, t, thread_scratch(kernels.scratch(t.q_len, t.k_len, p.head_dim, backward)));
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) { register_attention<CpuAttention>(m); }

}  // namespace bert_unpad
