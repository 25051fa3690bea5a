// Optimal cuts by dynamic programming over lengths rounded up to the attention tile. See groups.h.
#include "groups.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace bert_unpad::balancer {
namespace {

constexpr int64_t kTile = 64;  // attention computes scores in tiles, so lengths cost by the tile

int64_t tiles(int64_t length) { return std::max<int64_t>((length + kTile - 1) / kTile, 1); }

// Ends of the groups that minimise sum(count * tiles(max)^2), as positions in `ends`; `size[k]` is
// the tile count of bin k (descending), ends[k] the number of sequences up to and including it. Of
// equally cheap choices the one with the fewest groups.
std::vector<size_t> best_cuts(const std::vector<int64_t>& size, const std::vector<int64_t>& ends,
                              size_t max_groups) {
  const size_t bins = size.size();
  const size_t groups = std::min(max_groups, bins);
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  // cost[g][k]: cheapest way to put the first k bins into g groups; from[g][k]: where its last one
  // begins.
  std::vector<std::vector<double>> cost(groups + 1, std::vector<double>(bins + 1, kInfinite));
  std::vector<std::vector<size_t>> from(groups + 1, std::vector<size_t>(bins + 1, 0));
  cost[0][0] = 0.0;
  for (size_t g = 1; g <= groups; ++g) {
    for (size_t k = g; k <= bins; ++k) {
      for (size_t i = g - 1; i < k; ++i) {
        const auto count = static_cast<double>(ends[k - 1] - (i > 0 ? ends[i - 1] : 0));
        const auto side = static_cast<double>(size[i]);
        const double candidate = cost[g - 1][i] + count * side * side;
        if (candidate < cost[g][k]) {
          cost[g][k] = candidate;
          from[g][k] = i;
        }
      }
    }
  }
  size_t g = 1;
  for (size_t more = 2; more <= groups; ++more) {
    if (cost[more][bins] < cost[g][bins]) g = more;
  }
  std::vector<size_t> cuts(g);
  for (size_t k = bins; g > 0; k = from[g][k], --g) cuts[g - 1] = k - 1;
  return cuts;
}

}  // namespace

std::vector<LengthGroup> length_groups(std::span<const int64_t> lengths, int64_t max_groups) {
  if (max_groups < 1) throw std::invalid_argument("max_groups: expected 1 or more");
  for (int64_t length : lengths) {
    if (length < 0) throw std::invalid_argument("lengths: expected no negative length");
  }
  if (lengths.empty()) return {};

  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  std::vector<int64_t> size;
  std::vector<int64_t> ends;
  for (int64_t i : order) {
    if (size.empty() || tiles(lengths[i]) != size.back()) {
      size.push_back(tiles(lengths[i]));
      ends.push_back(ends.empty() ? 0 : ends.back());
    }
    ++ends.back();
  }

  std::vector<LengthGroup> result;
  int64_t begin = 0;
  for (size_t cut : best_cuts(size, ends, static_cast<size_t>(max_groups))) {
    result.push_back({lengths[order[begin]], {order.begin() + begin, order.begin() + ends[cut]}});
    begin = ends[cut];
  }
  return result;
}

}  // namespace bert_unpad::balancer
