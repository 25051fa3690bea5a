// Reads ids on the device, which is the first place where they are checked.
#pragma once

#include "cuda/primitives.h"
#include "embedding/token_sort.h"

namespace bert_unpad::cuda {

// The id of a token in table number `table`; one that is not in the table stops the kernel before
// anything is read with it.
BU_DEVICE int64_t token_id(const TokenIds& tokens, int table, int64_t token) {
  const int64_t id = load_global<int64_t>(tokens.ids[table] + token);
  const bool inside = id >= 0 && id < tokens.entries[table];
  BU_REQUIRE(inside || table != 0, "input_ids must be in [0, entries of word)");
  BU_REQUIRE(inside || table != 1, "position_ids must be in [0, entries of position)");
  BU_REQUIRE(inside || table != 2, "token_type_ids must be in [0, entries of token_type)");
  return id;
}

}  // namespace bert_unpad::cuda
