// Strategies that draw each global batch first and may then exchange its examples between ranks.
// Training without a global index of lengths can do no more than this, and comparisons use these
// strategies as baselines.
//
// Sampling. `random`: one permutation of the examples per epoch, cut into global batches. These do
// not depend on the number of ranks as long as num_replicas * batch_size stays the same. `quotas`:
// in every step each rank takes equally many examples of each quarter of the length range. Example
// j of a global batch goes to rank j mod num_replicas.
//
// Exchange. The examples of a step are sorted by work among `exchange_ranks` neighbouring ranks, or
// among all ranks, and dealt again: see dealing.h.
#pragma once

#include <string_view>

#include "dealing.h"
#include "epoch_plan.h"

namespace bert_unpad::balancer {

enum class Sampling { kRandom, kQuotas };
enum class Exchange { kNone, kNode, kWorld };

struct DrawnStrategy {
  Sampling sampling;
  Exchange exchange;
  Dealing dealing;

  // "random" or "quotas", alone or followed by "/node/" or "/world/" and "plain", "snake" or
  // "lpt". Throws std::invalid_argument.
  static DrawnStrategy parse(std::string_view name);
};

class DrawnPlan final : public EpochPlan {
 public:
  DrawnPlan(std::span<const uint16_t> lengths, std::span<const uint32_t> population,
            const EpochOptions& options, DrawnStrategy strategy);

  std::pair<int64_t, int64_t> block(int64_t step) const override;
  void rank_steps(int64_t rank, int64_t first, int64_t last, std::vector<uint32_t>& indices,
                  std::vector<int64_t>& ends) const override;
  std::vector<double> work(int64_t first, int64_t last) const override;
  std::vector<int64_t> received(int64_t first, int64_t last) const override;

 private:
  // A group's examples in one step and the rank, counted within the group, that each goes to.
  struct Deal {
    std::vector<uint32_t> indices;  // longest first
    std::vector<int64_t> works;
    std::vector<uint32_t> rank;
  };
  struct Group {
    int64_t first_rank, ranks;
  };

  void draw_by_quotas();
  Group group_of(int64_t rank) const;
  void deal(int64_t step, Group group, Deal& result) const;

  DrawnStrategy strategy_;
  int64_t group_ranks_;
};

}  // namespace bert_unpad::balancer
