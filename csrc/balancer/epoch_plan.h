// The epoch plan: which examples each rank gets in each step. Base class of all strategies.
//
// A plan is a pure function of its inputs: each rank builds the same plan and reads its own part,
// without communication. A strategy only says which examples a rank gets in a range of steps; the
// work per rank and the examples left after some steps follow from that.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "work_model.h"

namespace bert_unpad::balancer {

struct EpochOptions {
  int64_t num_replicas;
  int64_t batch_size;  // examples a rank gets in one step
  uint64_t seed;
  uint64_t epoch;
  uint64_t segment;  // how often this epoch's plan was made again after a change of ranks
  WorkModel work;
  int64_t pool_steps;      // stratified: how many steps are balanced against each other
  int64_t exchange_ranks;  // neighbouring ranks: those of a '/node/', and of a node
};

class EpochPlan {
 public:
  virtual ~EpochPlan() = default;

  // The same on all ranks. All steps but the last have batch_size examples on every rank.
  int64_t steps() const { return steps_; }
  int64_t num_examples() const { return num_examples_; }

  // The range of steps that is computed together with `step`: the cheapest unit to ask for.
  virtual std::pair<int64_t, int64_t> block(int64_t step) const = 0;

  // Appends the examples of `rank` in steps [first, last) to `indices`, longest first in each step,
  // and the running size of `indices` after each step to `ends`.
  virtual void rank_steps(int64_t rank, int64_t first, int64_t last, std::vector<uint32_t>& indices,
                          std::vector<int64_t>& ends) const = 0;

  // Work of every rank in steps [first, last): row-major [last - first, num_replicas].
  virtual std::vector<double> work(int64_t first, int64_t last) const;

  // What every rank receives from other ranks in steps [first, last): row-major [last - first,
  // num_replicas, 2, 2], from its `exchange_ranks` neighbours and from farther ranks, in examples
  // and in tokens. All 0 for a strategy that exchanges nothing.
  virtual std::vector<int64_t> received(int64_t first, int64_t last) const;

  // The examples that no rank has met in the first `done` steps, ascending.
  std::vector<uint32_t> remaining(int64_t done) const;

  void check_range(int64_t first, int64_t last) const;
  void check_rank(int64_t rank) const;

 protected:
  // `lengths` must outlive the plan. `population` lists the examples to use; empty means all.
  EpochPlan(std::span<const uint16_t> lengths, std::span<const uint32_t> population,
            const EpochOptions& options);

  std::span<const uint16_t> lengths_;
  EpochOptions options_;
  int64_t num_examples_;
  int64_t global_batch_;
  int64_t steps_;
  WorkTable work_;
  // Example indices in a strategy's own arrangement: the only large buffer, 4 bytes an example.
  std::vector<uint32_t> order_;
};

// Calls visit(index) for every example of the plan, in ascending order.
template <typename Visit>
void for_each_example(size_t num_lengths, std::span<const uint32_t> population, Visit visit) {
  if (population.empty()) {
    for (size_t i = 0; i < num_lengths; ++i) visit(static_cast<uint32_t>(i));
  } else {
    for (uint32_t index : population) visit(index);
  }
}

// `strategy` is "stratified", or a name that DrawnStrategy::parse knows (drawn.h). Throws
// std::invalid_argument that names the bad argument.
std::unique_ptr<EpochPlan> make_epoch_plan(const std::string& strategy,
                                           std::span<const uint16_t> lengths,
                                           std::span<const uint32_t> population,
                                           const EpochOptions& options);

}  // namespace bert_unpad::balancer
