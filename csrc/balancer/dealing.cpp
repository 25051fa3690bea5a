// See dealing.h.
#include "dealing.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>

namespace bert_unpad::balancer {

bool parse_dealing(std::string_view name, Dealing& dealing) {
  if (name == "plain")
    dealing = Dealing::kPlain;
  else if (name == "snake")
    dealing = Dealing::kSnake;
  else if (name == "lpt")
    dealing = Dealing::kLpt;
  else if (name == "greedy")
    dealing = Dealing::kGreedy;
  else
    return false;
  return true;
}

void deal(std::span<const int64_t> works, int64_t num_ranks, Dealing dealing,
          std::vector<uint32_t>& ranks) {
  const auto count = static_cast<int64_t>(works.size());
  ranks.resize(count);
  if (dealing == Dealing::kLpt || dealing == Dealing::kGreedy) {
    // (work so far, rank) of the ranks that have a place left, the lightest first. For lpt each has
    // as many places as divide evenly; then, for the lightest examples, one more.
    using Seat = std::pair<int64_t, uint32_t>;
    std::priority_queue<Seat, std::vector<Seat>, std::greater<>> seats;
    std::vector<int64_t> load(num_ranks, 0), places(num_ranks, 0);
    for (int64_t i = 0; i < count; ++i) {
      if (seats.empty()) {
        for (int64_t rank = 0; rank < num_ranks; ++rank) {
          places[rank] = dealing == Dealing::kGreedy ? count
                         : i == 0                    ? std::max<int64_t>(count / num_ranks, 1)
                                                     : 1;
          seats.push({load[rank], static_cast<uint32_t>(rank)});
        }
      }
      const uint32_t rank = seats.top().second;
      seats.pop();
      ranks[i] = rank;
      load[rank] += works[i];
      if (--places[rank] > 0) seats.push({load[rank], rank});
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const bool back = dealing == Dealing::kSnake && i / num_ranks % 2 == 1;
    const int64_t seat = i % num_ranks;
    ranks[i] = static_cast<uint32_t>(back ? num_ranks - 1 - seat : seat);
  }
}

void deal_by_speed(std::span<const int64_t> works, std::span<const double> speeds,
                   std::vector<uint32_t>& ranks) {
  ranks.resize(works.size());
  // Ranks of one speed, those with the least work first: only the first of each can be the one.
  using Seat = std::pair<int64_t, uint32_t>;  // work so far, rank
  std::map<double, std::priority_queue<Seat, std::vector<Seat>, std::greater<>>> seats;
  for (size_t rank = 0; rank < speeds.size(); ++rank) {
    seats[speeds[rank]].push({0, static_cast<uint32_t>(rank)});
  }
  for (size_t i = 0; i < works.size(); ++i) {
    auto first = seats.begin();
    double earliest = std::numeric_limits<double>::infinity();
    for (auto seat = seats.begin(); seat != seats.end(); ++seat) {
      const double done = static_cast<double>(seat->second.top().first + works[i]) / seat->first;
      if (done < earliest) {
        first = seat;
        earliest = done;
      }
    }
    const auto [load, rank] = first->second.top();
    first->second.pop();
    first->second.push({load + works[i], rank});
    ranks[i] = rank;
  }
}

std::vector<int64_t> deal_step(std::span<const uint16_t> lengths, std::span<const int64_t> counts,
                               int64_t group_ranks, Dealing dealing, const WorkModel& work,
                               std::span<const double> speeds) {
  work.validate();
  if (group_ranks < 1) throw std::invalid_argument("group_ranks: expected 1 or more");
  if (!speeds.empty() && dealing != Dealing::kGreedy)
    throw std::invalid_argument("speeds: expected none unless dealing is 'greedy'");
  if (!speeds.empty() && speeds.size() != counts.size())
    throw std::invalid_argument("speeds: expected one for each of " +
                                std::to_string(counts.size()) + " ranks, got " +
                                std::to_string(speeds.size()));
  for (double speed : speeds) {
    if (!(speed > 0 && std::isfinite(speed)))
      throw std::invalid_argument("speeds: expected finite numbers > 0");
  }
  const auto total = static_cast<int64_t>(lengths.size());
  int64_t left = total;
  for (int64_t count : counts) {
    if (count < 0 || count > left)
      throw std::invalid_argument("counts: expected numbers that add up to the lengths given");
    left -= count;
  }
  if (left != 0)
    throw std::invalid_argument("counts: expected numbers that add up to the lengths given");
  std::vector<int64_t> result(total);
  if (total == 0) return result;
  const WorkTable table(work, *std::max_element(lengths.begin(), lengths.end()));
  const auto num_ranks = static_cast<int64_t>(counts.size());
  std::vector<int64_t> order, works;
  std::vector<uint32_t> ranks;
  for (int64_t rank = 0, first = 0; rank < num_ranks; rank += group_ranks) {
    const int64_t size = std::min(group_ranks, num_ranks - rank);
    const int64_t count =
        std::accumulate(counts.begin() + rank, counts.begin() + rank + size, int64_t{0});
    order.resize(count);
    std::iota(order.begin(), order.end(), first);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
    works.clear();
    for (int64_t i : order) works.push_back(table.units[lengths[i]]);
    if (speeds.empty()) {
      deal(works, size, dealing, ranks);
    } else {
      deal_by_speed(works, speeds.subspan(rank, size), ranks);
    }
    for (int64_t i = 0; i < count; ++i) result[order[i]] = rank + ranks[i];
    first += count;
  }
  return result;
}

}  // namespace bert_unpad::balancer
