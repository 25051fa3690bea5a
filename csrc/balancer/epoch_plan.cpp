// Checks the inputs of an epoch plan, and derives work and remaining examples from a strategy's
// rank_steps. See epoch_plan.h.
#include "epoch_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "drawn.h"
#include "stratified.h"

namespace bert_unpad::balancer {
namespace {

void check(bool ok, const char* message) {
  if (!ok) throw std::invalid_argument(message);
}

// Runs in the initialiser list, before any member is sized by these values.
const EpochOptions& validated(std::span<const uint16_t> lengths,
                              std::span<const uint32_t> population, const EpochOptions& options) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check(!lengths.empty(), "lengths: expected at least one example, got none");
  check(lengths.size() < std::numeric_limits<uint32_t>::max(),
        "lengths: expected fewer than 2^32 - 1 examples");
  check(options.num_replicas >= 1 && options.num_replicas <= kMax,
        "num_replicas: expected 1 or more (and below 2^31)");
  check(options.batch_size >= 1 && options.batch_size <= kMax,
        "batch_size: expected 1 or more (and below 2^31)");
  check(options.pool_steps >= 1 && options.pool_steps <= kMax,
        "pool_steps: expected 1 or more (and below 2^31)");
  options.work.validate();
  for (size_t i = 0; i < population.size(); ++i) {
    check(population[i] < lengths.size(),
          "population: expected indices below the number of lengths");
    check(i == 0 || population[i - 1] < population[i], "population: expected ascending indices");
  }
  return options;
}

}  // namespace

EpochPlan::EpochPlan(std::span<const uint16_t> lengths, std::span<const uint32_t> population,
                     const EpochOptions& options)
    : lengths_(lengths),
      options_(validated(lengths, population, options)),
      num_examples_(population.empty() ? lengths.size() : population.size()),
      global_batch_(options.num_replicas * options.batch_size),
      steps_((num_examples_ - 1) / global_batch_ + 1),
      work_(options.work, *std::max_element(lengths.begin(), lengths.end())) {}

void EpochPlan::check_range(int64_t first, int64_t last) const {
  if (first < 0 || last < first || last > steps_) {
    throw std::invalid_argument(
        "first, last: expected 0 <= first <= last <= " + std::to_string(steps_) +
        " (the number of steps), got " + std::to_string(first) + ", " + std::to_string(last));
  }
}

void EpochPlan::check_rank(int64_t rank) const {
  if (rank < 0 || rank >= options_.num_replicas) {
    throw std::invalid_argument("rank: expected 0 <= rank < " +
                                std::to_string(options_.num_replicas) + ", got " +
                                std::to_string(rank));
  }
}

std::vector<double> EpochPlan::work(int64_t first, int64_t last) const {
  check_range(first, last);
  const int64_t ranks = options_.num_replicas;
  std::vector<double> result((last - first) * ranks);
  std::vector<uint32_t> indices;
  std::vector<int64_t> ends;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    indices.clear();
    ends.clear();
    rank_steps(rank, first, last, indices, ends);
    size_t i = 0;
    for (int64_t step = 0; step < last - first; ++step) {
      int64_t sum = 0;
      for (; i < static_cast<size_t>(ends[step]); ++i) sum += work_.units[lengths_[indices[i]]];
      result[step * ranks + rank] = static_cast<double>(sum) * work_.scale;
    }
  }
  return result;
}

std::vector<int64_t> EpochPlan::received(int64_t first, int64_t last) const {
  check_range(first, last);
  return std::vector<int64_t>((last - first) * options_.num_replicas * 4, 0);
}

std::vector<uint32_t> EpochPlan::remaining(int64_t done) const {
  check_range(0, done);
  std::vector<bool> planned(lengths_.size(), false);
  for (uint32_t index : order_) planned[index] = true;
  std::vector<uint32_t> indices;
  std::vector<int64_t> ends;
  for (int64_t rank = 0; rank < options_.num_replicas; ++rank) {
    indices.clear();
    ends.clear();
    rank_steps(rank, 0, done, indices, ends);
    for (uint32_t index : indices) planned[index] = false;
  }
  std::vector<uint32_t> left;
  for (size_t i = 0; i < planned.size(); ++i) {
    if (planned[i]) left.push_back(static_cast<uint32_t>(i));
  }
  return left;
}

std::unique_ptr<EpochPlan> make_epoch_plan(const std::string& strategy,
                                           std::span<const uint16_t> lengths,
                                           std::span<const uint32_t> population,
                                           const EpochOptions& options) {
  if (strategy == "stratified") {
    return std::make_unique<StratifiedPlan>(lengths, population, options);
  }
  return std::make_unique<DrawnPlan>(lengths, population, options, DrawnStrategy::parse(strategy));
}

}  // namespace bert_unpad::balancer
