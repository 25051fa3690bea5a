// See random.h.
#include "random.h"

#include <algorithm>

#include "rng.h"

namespace bert_unpad::planner {

RandomPlan::RandomPlan(std::span<const uint16_t> lengths, std::span<const uint32_t> population,
                       const PlanOptions& options)
    : Plan(lengths, population, options) {
  order_.reserve(num_examples_);
  for_each_example(lengths.size(), population, [&](uint32_t index) { order_.push_back(index); });
  Rng({options.seed, options.epoch, options.segment}).shuffle(std::span(order_));
}

std::pair<int64_t, int64_t> RandomPlan::block(int64_t step) const {
  check_range(step, step + 1);
  return {step, step + 1};
}

void RandomPlan::rank_steps(int64_t rank, int64_t first, int64_t last,
                            std::vector<uint32_t>& indices, std::vector<int64_t>& ends) const {
  check_rank(rank);
  check_range(first, last);
  for (int64_t step = first; step < last; ++step) {
    const auto begin = static_cast<std::ptrdiff_t>(indices.size());
    const int64_t end = std::min((step + 1) * global_batch_, num_examples_);
    for (int64_t i = step * global_batch_ + rank; i < end; i += options_.num_replicas) {
      indices.push_back(order_[i]);
    }
    std::sort(indices.begin() + begin, indices.end(), [&](uint32_t a, uint32_t b) {
      return lengths_[a] != lengths_[b] ? lengths_[a] > lengths_[b] : a < b;
    });
    ends.push_back(static_cast<int64_t>(indices.size()));
  }
}

}  // namespace bert_unpad::planner
