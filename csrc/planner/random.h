// The `random` strategy: what training without load balancing does, and the baseline of every
// comparison.
//
// One permutation of the examples an epoch, cut into global batches; example j of a global batch
// goes to rank j mod num_replicas. The permutation does not depend on the number of ranks, so
// neither do the global batches as long as num_replicas * batch_size stays the same.
#pragma once

#include "plan.h"

namespace bert_unpad::planner {

class RandomPlan final : public Plan {
 public:
  RandomPlan(std::span<const uint16_t> lengths, std::span<const uint32_t> population,
             const PlanOptions& options);

  std::pair<int64_t, int64_t> block(int64_t step) const override;
  void rank_steps(int64_t rank, int64_t first, int64_t last, std::vector<uint32_t>& indices,
                  std::vector<int64_t>& ends) const override;
};

}  // namespace bert_unpad::planner
