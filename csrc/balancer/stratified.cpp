// See stratified.h for the scheme.
#include "stratified.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace bert_unpad::balancer {
namespace {

// Steps whose work differs by at most one part in this count as equal. One in 1,024 costs up to
// 0.03 % of efficiency where steps cannot be made equal.
constexpr int64_t kEqualWorkParts = 2048;

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// Gives the examples of one row to ranks. In a row of unequal lengths the longest goes to the rank
// that has the least work so far, so that the ranks' totals over a pool agree; all ties are broken
// at random.
class Dealer {
 public:
  Dealer(int64_t ranks, Rng rng) : seats_(ranks), rng_(rng) { reset(); }

  void reset() {
    for (size_t rank = 0; rank < seats_.size(); ++rank)
      seats_[rank] = {0, static_cast<uint32_t>(rank)};
  }

  // slot[rank] is the place in `row` (longest first) of the example that `rank` gets, or kNone.
  template <typename WorkOf>
  void deal(std::span<const uint32_t> row, WorkOf work_of, std::vector<uint32_t>& slot) {
    rng_.shuffle(std::span(seats_));
    // Stable, so that the result is the same with every standard library.
    std::stable_sort(seats_.begin(), seats_.end(),
                     [](const Seat& a, const Seat& b) { return a.total < b.total; });
    slot.assign(seats_.size(), kNone);
    for (size_t i = 0; i < row.size(); ++i) {
      seats_[i].total += work_of(row[i]);
      slot[seats_[i].rank] = static_cast<uint32_t>(i);
    }
  }

 private:
  struct Seat {
    int64_t total;
    uint32_t rank;
  };
  std::vector<Seat> seats_;
  Rng rng_;
};

}  // namespace

StratifiedPlan::StratifiedPlan(std::span<const uint16_t> lengths,
                               std::span<const uint32_t> population, const EpochOptions& options)
    : EpochPlan(lengths, population, options),
      full_steps_(num_examples_ / global_batch_),
      // Pools of nearly equal size: a last one of a step or two could not be balanced.
      pools_((full_steps_ + options.pool_steps - 1) / options.pool_steps) {
  sort(population);
  move_tail_to_end();
  draw_pools();
  deal();
  divide();
}

Rng StratifiedPlan::rng(Purpose purpose, uint64_t part, uint64_t rank) const {
  return Rng({options_.seed, options_.epoch, options_.segment, purpose, part, rank});
}

int64_t StratifiedPlan::pool_begin(int64_t pool) const { return full_steps_ * pool / pools_; }

int64_t StratifiedPlan::pool_of(int64_t step) const {
  return ((step + 1) * pools_ - 1) / full_steps_;  // the largest pool with pool_begin(pool) <= step
}

std::span<const uint32_t> StratifiedPlan::pool_rows(int64_t pool) const {
  const int64_t begin = pool_begin(pool) * options_.batch_size;
  const int64_t end = pool_begin(pool + 1) * options_.batch_size;
  return std::span(rows_).subspan(begin, end - begin);
}

// Counting sort, longest first, then a shuffle within each length: this touches memory in order,
// where shuffling everything before a stable sort would miss the cache on every example.
void StratifiedPlan::sort(std::span<const uint32_t> population) {
  std::vector<int64_t> end(work_.units.size(), 0);
  for_each_example(lengths_.size(), population, [&](uint32_t i) { ++end[lengths_[i]]; });
  int64_t begin = 0;
  for (auto count = end.rbegin(); count != end.rend(); ++count) begin = *count += begin;

  order_.resize(num_examples_);
  std::vector<int64_t> next(end.size(), 0);
  // A length begins where the next longer one ends.
  std::copy(end.begin() + 1, end.end(), next.begin());
  const std::vector<int64_t> first = next;
  for_each_example(lengths_.size(), population,
                   [&](uint32_t i) { order_[next[lengths_[i]]++] = i; });

  for (size_t length = 0; length < end.size(); ++length) {
    rng(kTies, length)
        .shuffle(std::span(order_).subspan(first[length], end[length] - first[length]));
  }
}

// The tail is every (n / tail)-th example of the sorted list from a random start: each example is
// as likely as any other to be in it, and its lengths are those of the whole.
void StratifiedPlan::move_tail_to_end() {
  const uint64_t n = num_examples_;
  const uint64_t tail = n - static_cast<uint64_t>(full_steps_ * global_batch_);
  if (tail == 0 || tail == n) return;
  const uint64_t start = rng(kTail).below(static_cast<uint32_t>(n));
  std::vector<uint32_t> picked;
  picked.reserve(tail);
  auto to = order_.begin();
  for (uint64_t i = 0; i < n; ++i) {
    if (picked.size() < tail && i == (picked.size() * n + start) / tail) {
      picked.push_back(order_[i]);
    } else {
      *to++ = order_[i];
    }
  }
  std::copy(picked.begin(), picked.end(), to);
}

// Each of batch_size equal parts of the sorted rows gives every step one of its rows. Pools are
// thus as like each other as steps are: with rows drawn from the whole list the mean length of
// pools of 480 rows would vary by 3 %, now it is 0.1 %.
void StratifiedPlan::draw_pools() {
  const int64_t batch = options_.batch_size;
  rows_.resize(full_steps_ * batch);
  std::vector<uint32_t> part(full_steps_);
  Rng draw = rng(kRows);
  for (int64_t k = 0; k < batch; ++k) {
    std::iota(part.begin(), part.end(), static_cast<uint32_t>(k * full_steps_));
    draw.shuffle(std::span(part));
    for (int64_t step = 0; step < full_steps_; ++step) rows_[step * batch + k] = part[step];
  }
  for (int64_t pool = 0; pool < pools_; ++pool) {
    std::sort(rows_.begin() + pool_begin(pool) * batch,
              rows_.begin() + pool_begin(pool + 1) * batch);
  }
}

void StratifiedPlan::deal() {
  const int64_t ranks = options_.num_replicas;
  const auto work_of = [&](uint32_t index) { return work_.units[lengths_[index]]; };
  Dealer dealer(ranks, rng(kDeal));
  std::vector<uint32_t> slot;
  std::vector<uint32_t> copy;
  const auto deal_row = [&](std::span<uint32_t> row) {
    // A row of one length was shuffled by sort(), and adds the same to all ranks' totals.
    if (lengths_[row.front()] == lengths_[row.back()]) return;
    dealer.deal(row, work_of, slot);
    copy.assign(row.begin(), row.end());
    for (int64_t rank = 0; rank < ranks; ++rank) row[rank] = copy[slot[rank]];
  };

  for (int64_t pool = 0; pool < pools_; ++pool) {
    dealer.reset();
    for (uint32_t row : pool_rows(pool)) {
      deal_row(std::span(order_).subspan(static_cast<int64_t>(row) * ranks, ranks));
    }
  }
  dealer.reset();
  std::span<uint32_t> tail = std::span(order_).subspan(full_steps_ * global_batch_);
  for (; tail.size() >= static_cast<size_t>(ranks); tail = tail.subspan(ranks)) {
    deal_row(tail.first(ranks));
  }
  dealer.deal(tail, work_of, tail_slot_);
}

std::pair<int64_t, int64_t> StratifiedPlan::block(int64_t step) const {
  check_range(step, step + 1);
  if (step >= full_steps_) return {step, step + 1};
  const int64_t pool = pool_of(step);
  return {pool_begin(pool), pool_begin(pool + 1)};
}

// Ranks may hold slightly different examples of a row; rank 0's stand for all.
void StratifiedPlan::divide() {
  const int64_t batch = options_.batch_size;
  target_.resize(full_steps_);
  Balancer balancer;
  std::vector<Item> items;
  std::vector<std::pair<int64_t, int64_t>> by_load;
  for (int64_t pool = 0; pool < pools_; ++pool) {
    items.clear();
    for (uint32_t row : pool_rows(pool)) {
      items.push_back({work_.units[lengths_[order_[row * options_.num_replicas]]], row});
    }
    const int64_t first = pool_begin(pool);
    const int64_t steps = pool_begin(pool + 1) - first;
    balancer.partition(items, steps);

    by_load.clear();
    for (int64_t step = 0; step < steps; ++step) by_load.emplace_back(balancer.load(step), step);
    std::sort(by_load.begin(), by_load.end());
    for (int64_t step = 0; step < steps; ++step) {
      target_[first + step] = by_load[step].first;
      const auto rows = rows_.begin() + (first + step) * batch;
      const auto chosen = balancer.step(by_load[step].second);
      std::transform(chosen.begin(), chosen.end(), rows, [](const Item& i) { return i.index; });
      std::sort(rows, rows + batch);
    }
  }
}

// Which of the pool's steps, as divide() left them, `rank` runs at each time.
std::vector<uint32_t> StratifiedPlan::running_order(int64_t rank, int64_t pool) const {
  const auto targets =
      std::span(target_).subspan(pool_begin(pool), pool_begin(pool + 1) - pool_begin(pool));
  std::vector<uint32_t> own(targets.size());
  std::iota(own.begin(), own.end(), 0u);
  Rng mix = rng(kMix, pool, rank);
  for (size_t begin = 0, end = 0; begin < own.size(); begin = end) {
    const int64_t limit = targets[begin] + targets[begin] / kEqualWorkParts;
    while (end < own.size() && targets[end] <= limit) ++end;
    mix.shuffle(std::span(own).subspan(begin, end - begin));
  }
  std::vector<uint32_t> in_time(own.size());
  std::iota(in_time.begin(), in_time.end(), 0u);
  rng(kTimes, pool).shuffle(std::span(in_time));
  for (uint32_t& step : in_time) step = own[step];
  return in_time;
}

void StratifiedPlan::rank_steps(int64_t rank, int64_t first, int64_t last,
                                std::vector<uint32_t>& indices, std::vector<int64_t>& ends) const {
  check_rank(rank);
  check_range(first, last);
  Balancer balancer;
  std::vector<Item> items;
  int64_t step = first;
  while (step < std::min(last, full_steps_)) {
    const int64_t pool = pool_of(step);
    const int64_t begin = pool_begin(pool);
    const int64_t end = pool_begin(pool + 1);
    items.clear();
    for (uint32_t row : pool_rows(pool)) {
      const uint32_t index = order_[row * options_.num_replicas + rank];
      items.push_back({work_.units[lengths_[index]], index});
    }
    balancer.refine(items, std::span(target_).subspan(begin, end - begin));
    const std::vector<uint32_t> in_time = running_order(rank, pool);
    for (; step < std::min(last, end); ++step) {
      for (const Item& item : balancer.step(in_time[step - begin])) indices.push_back(item.index);
      ends.push_back(static_cast<int64_t>(indices.size()));
    }
  }
  if (step < last) {
    append_tail(rank, indices);
    ends.push_back(static_cast<int64_t>(indices.size()));
  }
}

void StratifiedPlan::append_tail(int64_t rank, std::vector<uint32_t>& indices) const {
  const int64_t ranks = options_.num_replicas;
  const auto tail = std::span(order_).subspan(full_steps_ * global_batch_);
  const int64_t full_rows = static_cast<int64_t>(tail.size()) / ranks;
  for (int64_t row = 0; row < full_rows; ++row) indices.push_back(tail[row * ranks + rank]);
  if (tail_slot_[rank] != kNone) indices.push_back(tail[full_rows * ranks + tail_slot_[rank]]);
}

}  // namespace bert_unpad::balancer
