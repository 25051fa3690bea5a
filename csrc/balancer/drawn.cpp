// See drawn.h.
#include "drawn.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "rng.h"

namespace bert_unpad::balancer {
namespace {

constexpr int64_t kQuotaBins = 4;

}  // namespace

DrawnStrategy DrawnStrategy::parse(std::string_view name) {
  const std::string text(name);
  const auto fail = [&] {
    throw std::invalid_argument(
        "strategy: expected 'stratified', or 'random' or 'quotas', alone or with '/node/' or "
        "'/world/' and 'plain', 'snake' or 'lpt' (for example 'random/world/lpt'), got '" +
        text + "'");
  };
  std::array<std::string_view, 3> parts;
  size_t count = 0;
  for (size_t begin = 0; begin <= name.size(); ++count) {
    const size_t end = std::min(name.find('/', begin), name.size());
    if (count == parts.size()) fail();
    parts[count] = name.substr(begin, end - begin);
    begin = end + 1;
  }
  DrawnStrategy strategy{Sampling::kRandom, Exchange::kNone, Dealing::kPlain};
  if (parts[0] == "quotas")
    strategy.sampling = Sampling::kQuotas;
  else if (parts[0] != "random")
    fail();
  if (count == 1) return strategy;
  if (count != 3 || (parts[1] != "node" && parts[1] != "world")) fail();
  strategy.exchange = parts[1] == "node" ? Exchange::kNode : Exchange::kWorld;
  // Plans have equally many examples on all ranks.
  if (!parse_dealing(parts[2], strategy.dealing) || strategy.dealing == Dealing::kGreedy) fail();
  return strategy;
}

DrawnPlan::DrawnPlan(std::span<const uint16_t> lengths, std::span<const uint32_t> population,
                     const EpochOptions& options, DrawnStrategy strategy)
    : EpochPlan(lengths, population, options), strategy_(strategy) {
  switch (strategy.exchange) {
    case Exchange::kNone:
      group_ranks_ = 1;
      break;
    case Exchange::kNode:
      if (options.exchange_ranks < 1)
        throw std::invalid_argument("exchange_ranks: expected 1 or more");
      group_ranks_ = std::min(options.exchange_ranks, options.num_replicas);
      break;
    case Exchange::kWorld:
      group_ranks_ = options.num_replicas;
  }
  order_.reserve(num_examples_);
  for_each_example(lengths.size(), population, [&](uint32_t index) { order_.push_back(index); });
  Rng({options.seed, options.epoch, options.segment}).shuffle(std::span(order_));
  if (strategy.sampling == Sampling::kQuotas) draw_by_quotas();
}

// Rearranges the permutation. In each full step every rank takes equally many examples of a bin;
// these counts follow the bin's share of all examples, by largest remainder of what it should have
// given so far. What does not divide evenly among the ranks is left for the last steps.
void DrawnPlan::draw_by_quotas() {
  const int64_t longest = std::max<int64_t>(*std::max_element(lengths_.begin(), lengths_.end()), 1);
  std::array<std::vector<uint32_t>, kQuotaBins> bins;
  for (uint32_t index : order_) {
    const int64_t length = std::max<int64_t>(lengths_[index], 1);
    bins[(length - 1) * kQuotaBins / longest].push_back(index);
  }
  std::array<int64_t, kQuotaBins> counts{}, taken{};  // a rank's counts; examples
  const auto take = [&](int64_t b, int64_t n) {
    n = std::min(n, static_cast<int64_t>(bins[b].size()) - taken[b]);
    order_.insert(order_.end(), bins[b].begin() + taken[b], bins[b].begin() + taken[b] + n);
    taken[b] += n;
  };
  order_.clear();
  for (int64_t step = 0; step < num_examples_ / global_batch_; ++step) {
    const int64_t end = (step + 1) * global_batch_;
    // (what the bin is behind its share, in parts of num_examples_; bin)
    std::array<std::pair<int64_t, int64_t>, kQuotaBins> behind;
    int64_t missing = options_.batch_size;
    for (int64_t b = kQuotaBins - 1; b >= 0; --b) {
      const auto size = static_cast<unsigned __int128>(bins[b].size());
      const auto due =
          static_cast<int64_t>(size * (step + 1) * options_.batch_size / num_examples_);
      const int64_t n = std::clamp<int64_t>(due - counts[b], 0, missing);
      const auto remainder = size * (step + 1) * options_.batch_size -
                             static_cast<unsigned __int128>(due) * num_examples_;
      behind[b] = {-static_cast<int64_t>(remainder) - (due - counts[b] - n) * num_examples_, b};
      counts[b] += n;
      missing -= n;
      take(b, n * options_.num_replicas);
    }
    std::sort(behind.begin(), behind.end());
    for (int64_t i = 0; missing > 0; i = (i + 1) % kQuotaBins, --missing) {
      const int64_t b = behind[i].second;
      ++counts[b];
      take(b, options_.num_replicas);
    }
    for (int64_t b = kQuotaBins - 1; b >= 0; --b)
      take(b, end - static_cast<int64_t>(order_.size()));
  }
  for (int64_t b = kQuotaBins - 1; b >= 0; --b) take(b, num_examples_);
}

std::pair<int64_t, int64_t> DrawnPlan::block(int64_t step) const {
  check_range(step, step + 1);
  return {step, step + 1};
}

DrawnPlan::Group DrawnPlan::group_of(int64_t rank) const {
  const int64_t first = rank / group_ranks_ * group_ranks_;
  return {first, std::min(group_ranks_, options_.num_replicas - first)};
}

void DrawnPlan::deal(int64_t step, Group group, Deal& result) const {
  result.indices.clear();
  const int64_t end = std::min((step + 1) * global_batch_, num_examples_);
  for (int64_t i = step * global_batch_; i < end; i += options_.num_replicas) {
    const int64_t first = std::min(i + group.first_rank, end);
    const int64_t last = std::min(first + group.ranks, end);
    result.indices.insert(result.indices.end(), order_.begin() + first, order_.begin() + last);
  }
  std::sort(result.indices.begin(), result.indices.end(), [&](uint32_t a, uint32_t b) {
    return lengths_[a] != lengths_[b] ? lengths_[a] > lengths_[b] : a < b;
  });
  result.works.clear();
  for (uint32_t index : result.indices) result.works.push_back(work_.units[lengths_[index]]);
  balancer::deal(result.works, group.ranks, strategy_.dealing, result.rank);
}

void DrawnPlan::rank_steps(int64_t rank, int64_t first, int64_t last,
                           std::vector<uint32_t>& indices, std::vector<int64_t>& ends) const {
  check_rank(rank);
  check_range(first, last);
  const Group group = group_of(rank);
  Deal dealt;
  for (int64_t step = first; step < last; ++step) {
    deal(step, group, dealt);
    for (size_t i = 0; i < dealt.indices.size(); ++i) {
      if (dealt.rank[i] == rank - group.first_rank) indices.push_back(dealt.indices[i]);
    }
    ends.push_back(static_cast<int64_t>(indices.size()));
  }
}

// Deals each group once, not once a rank.
std::vector<double> DrawnPlan::work(int64_t first, int64_t last) const {
  check_range(first, last);
  const int64_t ranks = options_.num_replicas;
  std::vector<double> result((last - first) * ranks);
  std::vector<int64_t> sums(ranks);
  Deal dealt;
  for (int64_t step = first; step < last; ++step) {
    std::fill(sums.begin(), sums.end(), 0);
    for (int64_t rank = 0; rank < ranks; rank += group_ranks_) {
      const Group group = group_of(rank);
      deal(step, group, dealt);
      for (size_t i = 0; i < dealt.indices.size(); ++i)
        sums[group.first_rank + dealt.rank[i]] += dealt.works[i];
    }
    for (int64_t rank = 0; rank < ranks; ++rank)
      result[(step - first) * ranks + rank] = static_cast<double>(sums[rank]) * work_.scale;
  }
  return result;
}

// Who has drawn an example is looked up by its index: dealing sorts them, and is the slower without
// a second value to carry along.
std::vector<int64_t> DrawnPlan::received(int64_t first, int64_t last) const {
  check_range(first, last);
  const int64_t ranks = options_.num_replicas;
  std::vector<int64_t> result((last - first) * ranks * 4, 0);
  if (strategy_.exchange == Exchange::kNone) return result;
  const int64_t node = std::max<int64_t>(options_.exchange_ranks, 1);
  std::vector<uint32_t> drawn_by(lengths_.size());
  Deal dealt;
  for (int64_t step = first; step < last; ++step) {
    const int64_t begin = step * global_batch_;
    const int64_t end = std::min(begin + global_batch_, num_examples_);
    for (int64_t i = begin; i < end; ++i)
      drawn_by[order_[i]] = static_cast<uint32_t>((i - begin) % ranks);
    for (int64_t rank = 0; rank < ranks; rank += group_ranks_) {
      const Group group = group_of(rank);
      deal(step, group, dealt);
      for (size_t i = 0; i < dealt.indices.size(); ++i) {
        const int64_t to = group.first_rank + dealt.rank[i], from = drawn_by[dealt.indices[i]];
        if (from == to) continue;
        int64_t* sums =
            &result[(((step - first) * ranks + to) * 2 + (from / node != to / node)) * 2];
        sums[0] += 1;
        sums[1] += lengths_[dealt.indices[i]];
      }
    }
  }
  return result;
}

}  // namespace bert_unpad::balancer
