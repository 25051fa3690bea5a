// Length groups for grouped attention: sequences of similar length share a launch (or a tile
// shape), so that short ones are not run at the size of the longest.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace bert_unpad::balancer {

struct LengthGroup {
  int64_t max_seqlen;
  std::vector<int64_t> sequences;  // positions in the batch, longest first
};

// At most `max_groups` groups, longest first, each sequence in exactly one.
std::vector<LengthGroup> length_groups(std::span<const int64_t> lengths, int64_t max_groups);

}  // namespace bert_unpad::balancer
