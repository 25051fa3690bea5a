// LAMB and StableAdamW on a CPU, whole and in two halves between which sums over shards are added
// up. They differ in the first pass and in the ratio that the second one multiplies updates by.
//
// A core is bound by what it reads: 16 bytes a parameter for Adam and for the first pass, 12 for
// the second, so 1.75x Adam's time without caches; 1.6x to 1.7x with what the second pass finds in
// them. Storing the update in a buffer for tensors that the last-level cache holds gained 3 %.
#include <atomic>
#include <cstring>
#include <memory>

#include "cpu/parallel.h"
#include "optim/chunks.h"
#include "optim/operators.h"
#include "optim/steps_cpu.h"

namespace bert_unpad {

namespace {

// Two passes over a list. `sums` is [tensors, kTensorSums].
class TwoPasses {
 public:
  TwoPasses(const UpdateList& list, const UpdateRule& rule, const Coefficients* coefficients)
      : list_(list),
        rule_(factors_of(rule)),
        coefficients_(coefficients),
        kernels_(update_kernels()),
        chunks_(chunks_of(list.tensors, &first_)) {}

  // Moments, and sums added up in the order of the chunks.
  void moments(float* sums) {
    partials_.resize(chunks_.size() * kTensorSums);
    const auto count = static_cast<int64_t>(chunks_.size());
    parallel_tasks(count, [&](int64_t i) { moments_of_chunk(i); });
    for (int64_t t = 0; t < tensors(); ++t) add_up(t, sums + t * kTensorSums);
  }

  void apply(const float* sums) const {
    const auto count = static_cast<int64_t>(chunks_.size());
    parallel_tasks(count, [&](int64_t i) { apply_to_chunk(i, sums); });
  }

  // Both, tensor by tensor: the second pass finds in the caches what the first has left there,
  // which is why it walks backwards. A task of the second pass waits for the tensor's first pass,
  // whose tasks were handed out before it and so are done or being worked on.
  void both() {
    partials_.resize(chunks_.size() * kTensorSums);
    std::vector<float> sums(tensors() * kTensorSums);
    const std::unique_ptr<std::atomic<int64_t>[]> left(new std::atomic<int64_t>[tensors()]);
    for (int64_t t = 0; t < tensors(); ++t) left[t] = first_[t + 1] - first_[t];
    const auto count = static_cast<int64_t>(chunks_.size());
    parallel_tasks(2 * count, [&](int64_t task) {
      // Tasks of tensor t: 2 first[t] .. 2 first[t + 1], its first pass and then its second.
      const int64_t t = chunks_[task / 2].tensor, begin = first_[t], end = first_[t + 1];
      const int64_t number = task - 2 * begin;
      if (number < end - begin) {
        moments_of_chunk(begin + number);
        // 1: the last chunk of the tensor. The sums are there before 0 says so.
        if (left[t].fetch_sub(1, std::memory_order_acq_rel) == 1) {
          add_up(t, sums.data() + t * kTensorSums);
          left[t].store(kSummed, std::memory_order_release);
        }
      } else {
        while (left[t].load(std::memory_order_acquire) != kSummed) {
        }
        apply_to_chunk(begin + (2 * (end - begin) - 1 - number), sums.data());
      }
    });
  }

 private:
  static constexpr int64_t kSummed = -1;

  int64_t tensors() const { return static_cast<int64_t>(list_.tensors.size()); }

  void moments_of_chunk(int64_t i) {
    const Chunk& c = chunks_[i];
    if (coefficients_[c.tensor].skipped()) return;
    const auto moments =
        rule_.ratio == Ratio::kRmsClip ? kernels_.stable_adamw_moments : kernels_.lamb_moments;
    moments(rule_, coefficients_[c.tensor], {list_.param_dtype, list_.grad_dtype},
            list_.tensors[c.tensor], c.begin, c.end, partials_.data() + i * kTensorSums);
  }

  void apply_to_chunk(int64_t i, const float* sums) const {
    const Chunk& c = chunks_[i];
    if (coefficients_[c.tensor].skipped()) return;
    const float* s = sums + c.tensor * kTensorSums;
    float ratios[2] = {1.0f, 1.0f};
    if (rule_.ratio != Ratio::kOne) {
      ratios[0] = ratio_of(rule_.ratio, s[0], s[1]);
      ratios[1] = ratio_of(rule_.ratio, s[0], s[2]);
    }
    kernels_.apply(rule_, coefficients_[c.tensor], {list_.param_dtype, list_.grad_dtype},
                   list_.tensors[c.tensor], ratios, c.begin, c.end);
  }

  void add_up(int64_t t, float* out) const {
    double sums[kTensorSums] = {};
    for (int64_t i = first_[t]; i < first_[t + 1]; ++i)
      for (int k = 0; k < kTensorSums; ++k) sums[k] += partials_[i * kTensorSums + k];
    for (int k = 0; k < kTensorSums; ++k) out[k] = static_cast<float>(sums[k]);
  }

  const UpdateList& list_;
  const RuleFactors rule_;
  const Coefficients* coefficients_;
  const UpdateKernels& kernels_;
  std::vector<int64_t> first_;
  const std::vector<Chunk> chunks_;
  std::vector<double> partials_;  // [chunks, kTensorSums]
};

struct CpuTwoPasses {
  CpuTwoPasses(const char*, const Tensor&) {}

  void both(const Update& update) const {
    const std::vector<Coefficients> coefficients = advance_steps(update);
    TwoPasses(update.list, update.rule, coefficients.data()).both();
  }

  void moments(const Update& update, Tensor& sums, Tensor& rows) const {
    const std::vector<Coefficients> coefficients = advance_steps(update);
    TwoPasses(update.list, update.rule, coefficients.data())
        .moments(sums.mutable_data_ptr<float>());
    std::memcpy(rows.mutable_data_ptr(), coefficients.data(),
                coefficients.size() * sizeof(Coefficients));
  }

  // Copies, because the tensor's memory may not be aligned as Coefficients are.
  void apply(const UpdateRule& rule, const UpdateList& list, const float* sums,
             const float* rows) const {
    std::vector<Coefficients> copy(list.tensors.size());
    std::memcpy(copy.data(), rows, copy.size() * sizeof(Coefficients));
    TwoPasses(list, rule, copy.data()).apply(sums);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("lamb_", TORCH_BOX(&lamb_<CpuTwoPasses>));
  m.impl("lamb_moments_", TORCH_BOX(&lamb_moments_<CpuTwoPasses>));
  m.impl("lamb_apply_", TORCH_BOX(&lamb_apply_<CpuTwoPasses>));
  m.impl("stable_adamw_", TORCH_BOX(&stable_adamw_<CpuTwoPasses>));
  m.impl("stable_adamw_moments_", TORCH_BOX(&stable_adamw_moments_<CpuTwoPasses>));
  m.impl("stable_adamw_apply_", TORCH_BOX(&stable_adamw_apply_<CpuTwoPasses>));
}

}  // namespace bert_unpad
