// Gradients of embedding tables from sorted tokens. No torch here.
#pragma once

#include "common/types.h"
#include "embedding/token_sort.h"

namespace bert_unpad::cuda {

struct TableGradientParams {
  SortedTokens sorted;
  int64_t entries[kTables];
  int64_t tokens, hidden;
  int64_t stride;   // of the fp32 rows: `hidden` rounded up to a multiple of 4
  const float* dz;  // [tokens, stride]
  float* pieces;    // [table_gradient_pieces, stride], scratch memory
  DType dtype;
  void* tables[kTables];  // [entries, hidden]
};

int64_t table_gradient_pieces(int64_t tokens);

// tables[t][id] = the sum, in token order, of dz over the tokens with that id; zeros for none.
void table_gradients(const char* op, const TableGradientParams& p, cudaStream_t stream);

}  // namespace bert_unpad::cuda
