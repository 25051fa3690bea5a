// The tokens of each embedding table by id, and in token order within an id. No torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace bert_unpad::cuda {

inline constexpr int kTables = 3;  // word, position, token type

struct TokenIds {
  const int64_t* ids[kTables];  // [count]
  int64_t entries[kTables];     // < 2^31
  int64_t count;                // < 2^31
};

// Pointers into the scratch memory of a sort.
struct SortedTokens {
  const int32_t* ids[kTables];    // [count], ascending
  const int32_t* order[kTables];  // [count]: the tokens that have them
  const int32_t* first[kTables];  // [entries + 1]: where an id's tokens begin in `order`
};

// 32-bit words of scratch memory.
int64_t token_sort_words(const TokenIds& tokens);

// A stable radix sort of all tables at once. Ids that are no table's entry stop the kernel. `op`
// names the operator in error messages.
SortedTokens sort_tokens(const char* op, const TokenIds& tokens, int32_t* space,
                         cudaStream_t stream);

}  // namespace bert_unpad::cuda
