// Gradients of embedding tables on the CPU: every row is the sum of the gradients of its tokens.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "embedding/embedding.h"

namespace bert_unpad {

// The tokens of a table, by id and in token order within an id: a counting sort.
struct TokensById {
  std::vector<int32_t> first;  // [entries + 1]
  std::vector<int32_t> order;  // [tokens]

  TokensById(const int64_t* ids, int64_t tokens, int64_t entries)
      : first(entries + 1, 0), order(tokens) {
    for (int64_t i = 0; i < tokens; ++i) ++first[ids[i] + 1];
    for (int64_t e = 0; e < entries; ++e) first[e + 1] += first[e];
    std::vector<int32_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < tokens; ++i) order[next[ids[i]]++] = static_cast<int32_t>(i);
  }
};

// table [entries, columns] = for each id the sum of its tokens' rows (fp32, of length `stride`).
// No atomics: a row has one writer. An id with many tokens ([CLS], a token type) is cut into pieces
// of fixed size whose sums are added in order, so that the work is even and the bits do not depend
// on the number of threads.
inline void scatter_rows(const EmbeddingKernels& kernels, const float* rows, int64_t stride,
                         const TokensById& tokens, int64_t columns, DType dtype, void* table) {
  constexpr int64_t kPiece = 256;  // tokens
  constexpr int64_t kIdsPerTask = 64;
  const int64_t entries = static_cast<int64_t>(tokens.first.size()) - 1;
  struct Piece {
    int64_t begin, end;
  };
  struct LongId {
    int64_t id, first_piece, pieces;
  };
  std::vector<Piece> pieces;
  std::vector<LongId> long_ids;
  for (int64_t id = 0; id < entries; ++id) {
    const int64_t begin = tokens.first[id], end = tokens.first[id + 1];
    if (end - begin <= kPiece) continue;
    long_ids.push_back(
        {id, static_cast<int64_t>(pieces.size()), (end - begin + kPiece - 1) / kPiece});
    for (int64_t b = begin; b < end; b += kPiece) pieces.push_back({b, std::min(b + kPiece, end)});
  }
  const int64_t num_pieces = static_cast<int64_t>(pieces.size());
  std::vector<float> partials(num_pieces * stride);
  std::vector<int32_t> piece_order(num_pieces);
  for (int64_t i = 0; i < num_pieces; ++i) piece_order[i] = static_cast<int32_t>(i);
  const auto row_of = [&](int64_t id) {
    return static_cast<char*>(table) + id * columns * element_size(dtype);
  };

  const int64_t id_tasks = (entries + kIdsPerTask - 1) / kIdsPerTask;
  parallel_tasks(num_pieces + id_tasks, [&](int64_t task) {
    if (task < num_pieces) {
      const Piece piece = pieces[task];
      kernels.sum_rows(rows, stride, tokens.order.data() + piece.begin, piece.end - piece.begin,
                       columns, DType::kFloat32, partials.data() + task * stride);
      return;
    }
    const int64_t begin = (task - num_pieces) * kIdsPerTask;
    for (int64_t id = begin; id < std::min(begin + kIdsPerTask, entries); ++id) {
      const int64_t first = tokens.first[id], count = tokens.first[id + 1] - first;
      if (count <= kPiece)
        kernels.sum_rows(rows, stride, tokens.order.data() + first, count, columns, dtype,
                         row_of(id));
    }
  });
  parallel_tasks(static_cast<int64_t>(long_ids.size()), [&](int64_t i) {
    const LongId& l = long_ids[i];
    kernels.sum_rows(partials.data(), stride, piece_order.data() + l.first_piece, l.pieces, columns,
                     dtype, row_of(l.id));
  });
}

}  // namespace bert_unpad
