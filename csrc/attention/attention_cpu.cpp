// Variable-length attention on the CPU: checks, task list, dispatch.
#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "attention/operators.h"
#include "attention/sequences_cpu.h"
#include "common/allocate.h"
#include "common/checks.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/rng.h"

namespace bert_unpad {

namespace {

const AttentionKernels& kernels_for(DType dtype) {
  const bool by_bf16 = isa() == Isa::kAmx || fast_bf16_dot_products();
  return dtype == DType::kBFloat16 && by_bf16 ? *attention_bf16_kernels() : attention_kernels();
}

// Checks the values of a schedule, which the CPU does not need: make_tasks sorts. A wrong one must
// not pass here and fail on a GPU.
void check_schedule_values(const std::optional<Tensor>& order, const std::optional<Tensor>& groups,
                           const int32_t* cu_q, const int32_t* cu_k, int64_t sequences,
                           const char* op) {
  if (!order) return;
  const auto* values = order->const_data_ptr<int32_t>();
  const int64_t columns = order->dim() == 2 ? kOrderColumns : 1;
  const auto sequence = [&](int64_t i) { return values[columns * i]; };
  std::vector<char> seen(sequences);
  for (int64_t i = 0; i < sequences; ++i) {
    const int32_t b = sequence(i);
    check(b >= 0 && b < sequences && !seen[b], op, ": order must be a permutation of 0 .. ",
          sequences - 1, ", but entry ", i, " is ", b);
    seen[b] = 1;
    if (columns == 1) continue;
    const int32_t* row = values + columns * i;
    check(row[1] == cu_k[b] && row[2] == cu_k[b + 1] - cu_k[b] && row[3] == 0, op,
          ": " BU_ORDER_ROW ", but row ", i, " is [", b, ", ", row[1], ", ", row[2], ", ", row[3],
          "] where sequence ", b, " begins at ", cu_k[b], " and has ", cu_k[b + 1] - cu_k[b],
          " tokens");
  }
  if (!groups) return;
  int64_t i = 0;
  for (const AttentionGroup& group : read_groups(*groups, sequences, op)) {
    for (const int64_t end = i + group.sequences; i < end; ++i) {
      const int32_t b = sequence(i);
      const int32_t q_len = cu_q[b + 1] - cu_q[b], k_len = cu_k[b + 1] - cu_k[b];
      check(q_len <= group.max_q && k_len <= group.max_k, op, ": groups allows ", group.max_q,
            " queries and ", group.max_k, " keys where sequence ", b, " has ", q_len, " and ",
            k_len);
    }
  }
}

// One call of an operator; see operators.h.
class CpuAttention {
 public:
  const char* op;
  AttentionCpuParams p{};

  explicit CpuAttention(const char* name) : op(name) {}

  void set_model(const Tensor& like, const AttentionHeads& heads,
                 const AttentionSettings& settings) {
    set_common(p, like, heads.q, heads.dim, settings.scale, settings.dropout_p, op);
    p.kv_heads = static_cast<int>(heads.kv);
    check(heads.dim >= 1 && heads.dim <= 256, op, ": head_dim must be between 1 and 256, got ",
          heads.dim);
    if (settings.dropout_p > 0.0) p.rng = read_rng(settings.rng, op);
  }

  void set_sequences(const AttentionRows& q, const AttentionRows& k,
                     const AttentionSettings& settings) {
    for (const AttentionRows* rows : {&q, &k})
      check(rows->cu_seqlens.is_cpu(), op, ": ", rows->cu_name,
            " must be on the CPU like the data");
    const int64_t sequences = check_sequences(q, k, op);
    cu_q_ = check_cu_seqlens(q, op);
    cu_k_ = check_cu_seqlens(k, op);
    check_schedule(settings.order, settings.groups, q, k, sequences, op);
    check_schedule_values(settings.order, settings.groups, cu_q_, cu_k_, sequences, op);
    order_ = by_work(cu_q_, cu_k_, sequences);
  }

  void set_positions(const Tensor& q, const Tensor& k, const AttentionSettings& settings) {
    p.window = checked_window(settings.window_left, settings.window_right, op);
    check_query_positions(settings.query_positions, q, op);
    if (settings.query_positions)
      p.query_positions = settings.query_positions->const_data_ptr<int32_t>();
    if (check_bias(settings.bias, q, k, p.heads, op)) set_bias(settings.bias);
  }

  void set_saved(const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& q) {
    bert_unpad::set_saved(p, dout, out, lse, q.size(0), op);
  }

  void forward() {
    const AttentionKernels& kernels = kernels_for(p.dtype);
    run(forward_tasks(order_, cu_q_, cu_k_, p.heads, kernels.queries), false);
  }

  BiasGradients backward(const Tensor& like, const AttentionSettings& settings) {
    const AttentionKernels& kernels = kernels_for(p.dtype);
    std::vector<AttentionTask> tasks;
    bool several = false;
    int parts = 0;
    for (int i : order_) {
      AttentionTask sequence = sequence_task(cu_q_, cu_k_, i);
      sequence.part = parts;
      sequence.key_part = part_size(sequence.k_len, kernels.keys);
      several = several || sequence.key_part < sequence.k_len;
      int first = 0;
      do {  // a sequence without keys still has gradients of queries
        const int last = std::min(first + sequence.key_part, sequence.k_len);
        add_tasks(tasks, sequence, p.kv_heads, first, last);
        first = last;
        sequence.part = ++parts;
      } while (first < sequence.k_len);
    }
    const BiasArguments& bias = settings.bias;
    Tensor dquery = bias_gradient(bias.query, like, p.bias.dquery);
    Tensor dkey = bias_gradient(bias.key, like, p.bias.dkey);
    const bool table = bias.table && settings.table_gradient;
    std::vector<float> dtables(table ? parts * table_.size() : 0);  // of each part of a sequence
    if (table) p.bias.dtable = dtables.data();
    Tensor sums, query_sums;
    std::vector<int32_t> added;
    if (several) {
      const int64_t width = (p.head_dim + 15) / 16 * 16;
      sums = allocate(like, {p.heads, p.q_tokens, width}, ScalarType::Float);
      added.resize(p.heads * p.q_tokens);
      p.dq_sums = sums.mutable_data_ptr<float>();
      p.added = added.data();
      if (bias.query) {
        query_sums = allocate(like, {p.q_tokens, p.heads, p.bias.buckets}, ScalarType::Float);
        p.bias.dquery_sums = query_sums.mutable_data_ptr<float>();
      }
    }
    run(tasks, true);
    Tensor dtable = table ? allocate(*bias.table, {p.bias.buckets, p.heads}) : allocate(like, {0});
    if (table) {
      auto* sum = dtable.mutable_data_ptr<float>();
      for (int b = 0; b < p.bias.buckets; ++b)
        for (int h = 0; h < p.heads; ++h, ++sum) {
          *sum = 0.0f;
          for (int part = 0; part < parts; ++part)
            *sum += dtables[part * table_.size() + h * p.bias.buckets + b];
        }
    }
    return {dtable, dquery, dkey};
  }

 private:
  const int32_t *cu_q_, *cu_k_;
  std::vector<int> order_;
  std::vector<float> table_;  // of the position bias, [heads, buckets]

  void set_bias(const BiasArguments& bias) {
    set_bias_parts(p.bias, bias);
    for (int64_t i = 0; i < bias.buckets->size(0); ++i)
      check(p.bias.bucket[i] >= 0 && p.bias.bucket[i] < p.bias.buckets, op,
            ": bias_buckets must be at least 0 and below ", p.bias.buckets, ", but entry ", i,
            " is ", p.bias.bucket[i]);
    if (bias.table) {
      const auto* table = bias.table->const_data_ptr<float>();
      table_.resize(static_cast<int64_t>(p.heads) * p.bias.buckets);
      for (int b = 0; b < p.bias.buckets; ++b)
        for (int h = 0; h < p.heads; ++h) table_[h * p.bias.buckets + b] = *table++;
      p.bias.table = table_.data();
    }
  }

  Tensor bias_gradient(const OptionalTensor& rows, const Tensor& like, Packed<void>& out) const {
    if (!rows) return allocate(like, {0});
    Tensor gradient = allocate(*rows, {rows->size(0), p.heads, p.bias.buckets});
    out = writable(gradient, static_cast<int64_t>(p.heads) * p.bias.buckets, p.bias.buckets);
    return gradient;
  }

  void run(const std::vector<AttentionTask>& tasks, bool backward) {
    const AttentionKernels& kernels = kernels_for(p.dtype);
    const auto kernel = backward ? kernels.backward : kernels.forward;
    int32_t failed = 0;
    p.failed = &failed;
    parallel_tasks(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
      try {
        kernel(p, tasks[i], thread_scratch(kernels.scratch(p, tasks[i], backward)));
      } catch (...) {
        __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        throw;
      }
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) { register_attention<CpuAttention>(m); }

}  // namespace bert_unpad
