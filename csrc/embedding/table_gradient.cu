// Every row of a table's gradient is the sum of the gradients of its tokens: a warp sums a row, 128
// columns at a time, in the order of the sorted tokens.
//
// An id with many tokens ([CLS], a token type) would keep one warp busy for long. So the sorted
// tokens are cut into pieces of kPiece, wherever ids begin, and the tokens of an id that has more
// than kPiece are summed in two stages: by piece, then over the pieces. A piece meets at most two
// such ids: one that covers its first token, and one that begins later and covers its last. The
// cuts depend only on the ids, and so do the bits.
#include "embedding/table_gradient.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/vector.h"

namespace bert_unpad::cuda {
namespace {

constexpr int kPiece = 128;     // tokens
constexpr int kStrip = 32 * 4;  // columns of a warp
constexpr int kTableWarps = 4;  // of a block
constexpr int kRowsInFlight = 8;

// Sum of `count` rows, four columns of each; row(i) is where they begin.
template <class RowAt>
BU_DEVICE void sum_rows(float (&sum)[4], int64_t count, const RowAt& row) {
  for (int64_t first = 0; first < count; first += kRowsInFlight) {
    Vector<float, 4> x[kRowsInFlight];
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r)
      if (first + r < count) x[r] = load_vector<float, 4>(row(first + r));
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      if (first + r >= count) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += x[r].v[i];
    }
  }
}

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

// What a warp works on: a strip of columns of something.
struct Unit {
  int64_t number;
  int64_t column;  // of this lane
};
BU_DEVICE Unit unit_of(int64_t stride) {
  const int64_t strips = (stride + kStrip - 1) / kStrip;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kTableWarps + threadIdx.x / 32;
  return {warp / strips, warp % strips * kStrip + threadIdx.x % 32 * 4};
}

BU_KERNEL(32 * kTableWarps, 6) table_pieces_kernel(BU_PARAMS TableGradientParams p) {
  const int table = blockIdx.y;
  const Unit unit = unit_of(p.stride);
  const int64_t piece = unit.number / 2, begin = piece * kPiece;
  const int part = static_cast<int>(unit.number % 2);
  if (begin >= p.tokens || unit.column >= p.stride) return;
  const int64_t end = begin + kPiece < p.tokens ? begin + kPiece : p.tokens;
  const int32_t id = load_global<int32_t>(p.sorted.ids[table] + (part == 0 ? begin : end - 1));
  const Run run = run_of(p, table, id);
  if (run.end - run.begin <= kPiece || (part == 1 && run.begin <= begin)) return;
  const int64_t from = run.begin > begin ? run.begin : begin, to = run.end < end ? run.end : end;
  float sum[4] = {};
  sum_rows(sum, to - from, [&](int64_t i) {
    const int64_t token = load_global<int32_t>(p.sorted.order[table] + from + i);
    return p.dz + token * p.stride + unit.column;
  });
  store_vector<float, 4>(piece_sum(p, table, piece, part) + unit.column, sum);
}

template <class P, bool kWide>
BU_KERNEL(32 * kTableWarps, 6)
table_rows_kernel(BU_PARAMS TableGradientParams p) {
  const Unit unit = unit_of(p.stride);
  int64_t id = unit.number;
  int table = 0;
  for (; table < kTables && id >= p.entries[table]; ++table) id -= p.entries[table];
  if (table == kTables || unit.column >= p.hidden) return;
  const Run run = run_of(p, table, id);
  float sum[4] = {};
  if (run.end - run.begin <= kPiece) {
    sum_rows(sum, run.end - run.begin, [&](int64_t i) {
      const int64_t token = load_global<int32_t>(p.sorted.order[table] + run.begin + i);
      return p.dz + token * p.stride + unit.column;
    });
  } else {
    const int64_t first = run.begin / kPiece, last = (run.end - 1) / kPiece;
    sum_rows(sum, last - first + 1, [&](int64_t i) {
      const int part = i == 0 && run.begin % kPiece != 0 ? 1 : 0;
      return piece_sum(p, table, first + i, part) + unit.column;
    });
  }
  P* out = static_cast<P*>(p.tables[table]) + id * p.hidden + unit.column;
  if constexpr (kWide) {
    store_vector<P, 4>(out, sum);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (unit.column + i < p.hidden) store_global<P>(out + i, from_float<P>(sum[i]));
  }
}

dim3 grid_of(int64_t units, int64_t stride, unsigned tables) {
  const int64_t warps = units * ((stride + kStrip - 1) / kStrip);
  return dim3(static_cast<unsigned>((warps + kTableWarps - 1) / kTableWarps), tables);
}

}  // namespace

int64_t table_gradient_pieces(int64_t tokens) {
  return kTables * 2 * ((tokens + kPiece - 1) / kPiece);
}

void table_gradients(const char* op, const TableGradientParams& p, cudaStream_t stream) {
  const dim3 block(32 * kTableWarps);
  if (p.tokens > 0)
    launch(op, table_pieces_kernel,
           grid_of(table_gradient_pieces(p.tokens) / kTables, p.stride, kTables), block, 0, stream,
           p);
  const int64_t entries = p.entries[0] + p.entries[1] + p.entries[2];
  if (entries == 0) return;
  bool wide = p.hidden % 4 == 0;
  for (const void* table : p.tables) wide = wide && is_aligned(table, 16);
  dispatch(p.dtype, [&]<class P>() {
    launch(op, wide ? table_rows_kernel<P, true> : table_rows_kernel<P, false>,
           grid_of(entries, p.stride, 1), block, 0, stream, p);
  });
}

}  // namespace bert_unpad::cuda
