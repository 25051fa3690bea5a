// Every row of a table's gradient is the sum of the gradients of its tokens, in the order of the
// sorted tokens: a thread sums four columns of a row, and neighbours the columns beside them.
//
// An id with many tokens ([CLS], a token type) would keep its threads busy for long. So the sorted
// tokens are cut into pieces of kPiece, wherever ids begin, and the tokens of an id that has more
// than kPiece are summed in two stages: by piece, then over the pieces. A piece meets at most two
// such ids: one that covers its first token, and one that begins later and covers its last. The
// cuts depend only on the ids, and so do the bits.
#include "embedding/table_gradient.h"

#include <algorithm>

#include "cuda/architecture.h"
#include "cuda/launch.h"
#include "cuda/sum_rows.h"
#include "cuda/vector.h"

namespace bert_unpad::cuda {
namespace {

constexpr int kPiece = 128;  // tokens
constexpr int kTableThreads = 256;
// With more ptxas would spill registers on Blackwell.
constexpr int kTableBlocks = kBlackwell ? 2 : 3, kRowsInFlight = kBlackwell ? 6 : 8;

struct Run {
  int64_t begin, end;
};
BU_DEVICE Run run_of(const TableGradientParams& p, int table, int64_t id) {
  return {load_global<int32_t>(p.sorted.first[table] + id),
          load_global<int32_t>(p.sorted.first[table] + id + 1)};
}

// Row of `pieces`: the run that covers the piece's first token, or (part = 1) the later one.
BU_DEVICE float* piece_sum(const TableGradientParams& p, int table, int64_t piece, int part) {
  const int64_t pieces = (p.tokens + kPiece - 1) / kPiece;
  return p.pieces + ((table * pieces + piece) * 2 + part) * p.stride;
}

// Which row of sums this thread works on.
BU_DEVICE int64_t row_of_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

// f(column) for the groups of four columns of a row that are this thread's.
template <class F>
BU_DEVICE void for_columns(int64_t columns, const F& f) {
  for (int64_t column = 4 * threadIdx.x; column < columns; column += 4 * blockDim.x) f(column);
}

// Adds up rows of dz, of the sorted tokens from `from` on.
BU_DEVICE void sum_tokens(const TableGradientParams& p, int table, int64_t from, int64_t count,
                          int64_t column, float (&sum)[4]) {
  sum_rows<kRowsInFlight>(sum, count, [&](int64_t i) {
    const int64_t token = load_global<int32_t>(p.sorted.order[table] + from + i);
    return p.dz + token * p.stride + column;
  });
}

BU_KERNEL(kTableThreads, kTableBlocks) table_pieces_kernel(BU_PARAMS TableGradientParams p) {
  const int table = blockIdx.y;
  const int64_t piece = row_of_thread() / 2, begin = piece * kPiece;
  const int part = static_cast<int>(row_of_thread() % 2);
  if (begin >= p.tokens) return;
  const int64_t end = begin + kPiece < p.tokens ? begin + kPiece : p.tokens;
  const int32_t id = load_global<int32_t>(p.sorted.ids[table] + (part == 0 ? begin : end - 1));
  const Run run = run_of(p, table, id);
  if (run.end - run.begin <= kPiece || (part == 1 && run.begin <= begin)) return;
  const int64_t from = run.begin > begin ? run.begin : begin, to = run.end < end ? run.end : end;
  for_columns(p.stride, [&](int64_t column) {
    float sum[4] = {};
    sum_tokens(p, table, from, to - from, column, sum);
    store_vector<float, 4>(piece_sum(p, table, piece, part) + column, sum);
  });
}

template <class P, bool kWide>
BU_KERNEL(kTableThreads, kTableBlocks)
table_rows_kernel(BU_PARAMS TableGradientParams p) {
  int64_t id = row_of_thread();
  int table = 0;
  for (; table < kTables && id >= p.entries[table]; ++table) id -= p.entries[table];
  if (table == kTables) return;
  const Run run = run_of(p, table, id);
  const int64_t first = run.begin / kPiece, last = (run.end - 1) / kPiece;  // pieces
  P* const out = static_cast<P*>(p.tables[table]) + id * p.hidden;
  for_columns(p.hidden, [&](int64_t column) {
    float sum[4] = {};
    if (run.end - run.begin <= kPiece) {
      sum_tokens(p, table, run.begin, run.end - run.begin, column, sum);
    } else {
      sum_rows<kRowsInFlight>(sum, last - first + 1, [&](int64_t i) {
        const int part = i == 0 && run.begin % kPiece != 0 ? 1 : 0;
        return piece_sum(p, table, first + i, part) + column;
      });
    }
    if constexpr (kWide) {
      store_vector<P, 4>(out + column, sum);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (column + i < p.hidden) store_global<P>(out + column + i, from_float<P>(sum[i]));
    }
  });
}

// A row's threads side by side, and several rows where they are short.
dim3 block_of(int64_t stride) {
  const auto width = static_cast<unsigned>(std::min<int64_t>(kTableThreads, stride / 4));
  return dim3(width, kTableThreads / width);
}
dim3 grid_of(int64_t rows, dim3 block, unsigned tables) {
  return dim3(static_cast<unsigned>((rows + block.y - 1) / block.y), tables);
}

}  // namespace

int64_t table_gradient_pieces(int64_t tokens) {
  return kTables * 2 * ((tokens + kPiece - 1) / kPiece);
}

void table_gradients(const char* op, const TableGradientParams& p, cudaStream_t stream) {
  const dim3 block = block_of(p.stride);
  if (p.tokens > 0)
    launch(op, table_pieces_kernel,
           grid_of(table_gradient_pieces(p.tokens) / kTables, block, kTables), block, 0, stream, p);
  const int64_t entries = p.entries[0] + p.entries[1] + p.entries[2];
  if (entries == 0) return;
  bool wide = p.hidden % 4 == 0;
  for (const void* table : p.tables) wide = wide && is_aligned(table, 16);
  dispatch(p.dtype, [&]<class P>() {
    launch(op, wide ? table_rows_kernel<P, true> : table_rows_kernel<P, false>,
           grid_of(entries, block, 1), block, 0, stream, p);
  });
}

}  // namespace bert_unpad::cuda
