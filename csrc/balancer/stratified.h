// The `stratified` strategy: every rank gets the same work in every step, and no example moves
// between ranks.
//
// 1. Sort all examples by length, once an epoch; equal lengths are shuffled.
// 2. Cut the sorted list into rows of num_replicas examples and give each rank one of every row:
//    all ranks then hold almost the same lengths.
// 3. Draw rows at random, evenly from short to long, into pools of `pool_steps` steps, and divide
//    each pool's rows into steps of equal work (balance.h). All ranks draw and divide alike.
// 4. Each rank adjusts that division to the examples it really has, by swapping examples between
//    its own steps, and runs steps of equal work in its own order. So the lengths in one global
//    step are a mixture of the whole pool, and still no rank waits for another. Where steps cannot
//    have equal work (small batches) the order is the same on all ranks.
//
// Examples that do not fill a step on all ranks are drawn evenly from the sorted list and form the
// last step, dealt the same way.
#pragma once

#include "balance.h"
#include "epoch_plan.h"
#include "rng.h"

namespace bert_unpad::balancer {

class StratifiedPlan final : public EpochPlan {
 public:
  StratifiedPlan(std::span<const uint16_t> lengths, std::span<const uint32_t> population,
                 const EpochOptions& options);

  std::pair<int64_t, int64_t> block(int64_t step) const override;
  void rank_steps(int64_t rank, int64_t first, int64_t last, std::vector<uint32_t>& indices,
                  std::vector<int64_t>& ends) const override;

 private:
  enum Purpose : uint64_t { kTies = 1, kTail, kRows, kDeal, kTimes, kMix };

  Rng rng(Purpose purpose, uint64_t part = 0, uint64_t rank = 0) const;
  int64_t pool_begin(int64_t pool) const;  // first step
  int64_t pool_of(int64_t step) const;
  std::span<const uint32_t> pool_rows(int64_t pool) const;

  void sort(std::span<const uint32_t> population);
  void move_tail_to_end();
  void draw_pools();
  void deal();
  void divide();
  std::vector<uint32_t> running_order(int64_t rank, int64_t pool) const;
  void append_tail(int64_t rank, std::vector<uint32_t>& indices) const;

  int64_t full_steps_;  // steps with batch_size examples on every rank
  int64_t pools_;
  // Row r of full_steps_ * batch_size is order_[r * num_replicas ...], one example a rank; row 0
  // has the longest. The tail follows, in rows as well, longest first; its last row may be shorter.

  // Row numbers, [pool, step, batch], longest first in each step; lightest step first in each pool.
  std::vector<uint32_t> rows_;
  // By step, in the order of rows_: the work that divide() gave it.
  std::vector<int64_t> target_;
  // By rank: its place in the tail's last row, kNone if it has none.
  std::vector<uint32_t> tail_slot_;
};

}  // namespace bert_unpad::balancer
