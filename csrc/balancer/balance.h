// Divides a pool of examples into steps of equal count and nearly equal, or given, work.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace bert_unpad::balancer {

struct Item {
  int64_t work;
  uint32_t index;
};

// Keeps its buffers between pools: one rank's epoch has thousands of them.
class Balancer {
 public:
  // Divides `items` (steps * batch of them, heaviest first) into steps of equal work.
  void partition(std::span<const Item> items, int64_t steps);

  // Starts from a division that is at hand, items as [steps, batch], each step heaviest first, and
  // brings the work of each step as near to its target as it can. The targets need not add up to
  // the total.
  void refine(std::span<const Item> items, std::span<const int64_t> targets);

  // The result of either, valid until the next call: items of a step, heaviest first, and their
  // work.
  std::span<const Item> step(int64_t step) const {
    return std::span(grouped_).subspan(step * batch_, batch_);
  }
  int64_t load(int64_t step) const;

 private:
  void level();
  bool lower_heaviest();
  bool raise_lightest();
  bool try_swap(size_t high_place, size_t low_place);

  int64_t batch_ = 0;
  std::vector<Item> grouped_;                            // [steps, batch]
  std::vector<std::pair<int64_t, uint32_t>> by_excess_;  // (work above the target, step), ascending
};

}  // namespace bert_unpad::balancer
