// How examples are dealt out among ranks. Shared by the epoch plan (drawn.h) and by training on
// streams, where ranks tell each other the lengths of one step's examples.
//
// Examples come longest first. `plain` deals them round after round. `snake` deals every second
// round backwards. `lpt` (longest processing time first; Graham, 1969) gives each to the rank with
// the least work so far that has a place left, so numbers of examples per rank differ by one at
// most. `greedy` is `lpt` as it was published, without places: work is more equal where ranks have
// few examples, but numbers of examples are not. Ranks of unequal speed get work in proportion to
// it: each example goes to the rank that would be done with it first, so numbers of examples
// differ.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "work_model.h"

namespace bert_unpad::balancer {

enum class Dealing { kPlain, kSnake, kLpt, kGreedy };

// "plain", "snake", "lpt" or "greedy"; false for anything else.
bool parse_dealing(std::string_view name, Dealing& dealing);

// Writes to ranks[i] which of `num_ranks` ranks gets example i; works[i] is that example's work.
void deal(std::span<const int64_t> works, int64_t num_ranks, Dealing dealing,
          std::vector<uint32_t>& ranks);

// The same for ranks of unequal speed, a number > 0 for each.
void deal_by_speed(std::span<const int64_t> works, std::span<const double> speeds,
                   std::vector<uint32_t>& ranks);

// Deals out what all ranks have read for one step. `lengths` holds all examples, rank after rank;
// `counts` says how many each rank has. Examples stay within groups of `group_ranks` neighbouring
// ranks. `speeds` are those of all ranks, with `greedy` only; empty where all are alike. Returns
// each example's new rank. A pure function of its arguments: work is in integers, and speeds only
// divide it, so all ranks get the same. Throws std::invalid_argument.
std::vector<int64_t> deal_step(std::span<const uint16_t> lengths, std::span<const int64_t> counts,
                               int64_t group_ranks, Dealing dealing, const WorkModel& work,
                               std::span<const double> speeds);

}  // namespace bert_unpad::balancer
