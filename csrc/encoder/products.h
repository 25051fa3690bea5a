// Linear layers of an encoder on a CPU, in fp32, bf16 or 8 bits: weights, inputs, and the product.
#pragma once

#include <algorithm>

#include "common/checks.h"
#include "cpu/parallel.h"
#include "encoder/layer.h"

namespace bert_unpad {

// Runs fn(i) for i in [0, n), on all threads or on this one.
template <class F>
void for_tasks(bool on_all, int64_t n, const F& fn) {
  if (on_all) return parallel_tasks(n, fn);
  for (int64_t i = 0; i < n; ++i) fn(i);
}

// To start work on all threads takes some microseconds, and far longer where others are busy: of
// less than so many products, or numbers that are read and written, it would be the larger part.
inline constexpr int64_t kProductsForAll = 1 << 21, kNumbersForAll = 1 << 17;

inline int64_t multiple_of(int64_t factor, int64_t n) { return (n + factor - 1) / factor * factor; }

// Rows of a block: of products of fp32, and of rounded numbers, which are done so fast that what
// comes between them has to stay in the second-level cache.
inline constexpr int64_t kBlockRows = 192, kRoundedBlockRows = 96;

// Blocks of at most `most` rows, and whether there is one whose products are split instead.
// `packs`: weights are packed in each call. Of fewer than four blocks a thread, and eight in all,
// since a block's memory grows with its rows, it is faster to pack them slab by slab, within the
// cache, than whole (fp32, 240 to 800 rows a thread: by 5 to 10 %).
struct RowBlocks {
  int64_t rows, size, count;
  bool split;

  RowBlocks(int64_t rows, bool packs, int64_t most) : rows(rows) {
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t few = packs ? std::max(threads, std::min<int64_t>(4 * threads, 8)) : threads;
    split = rows < few * most;
    const int64_t rounds = (rows + most * threads - 1) / (most * threads);
    size = split ? std::max<int64_t>(rows, 1)
                 : multiple_of(6, (rows + rounds * threads - 1) / (rounds * threads));
    count = (rows + size - 1) / size;
  }

  // fn(first row, rows)
  template <class F>
  void for_each(const F& fn) const {
    for_tasks(!split, count, [&](int64_t i) { fn(i * size, std::min(size, rows - i * size)); });
  }
};

// y = x weight^T + bias.
struct Linear {
  int64_t depth, columns;
  const float* weight;      // [columns, depth], or packed; null: rounded
  const bf16* bf16_panels;  // of 16 columns; null: not in bf16
  Int8Weights int8;
  const float* bias;
  const float* panels;  // the fp32 weight from column `first` on, packed; null: not packed
  int64_t first;
};

inline bool is_unpacked(const Linear& linear) { return linear.weight && !linear.panels; }

// Rows of a linear layer's input; x is `stride` apart.
struct Input {
  const float* x;
  int64_t stride, rows;
  Int8Rows int8;    // where a layer needs them
  bf16* bf16_rows;  // the same; rows to 16
};

// Rows of its output, `stride` apart, and contiguous rows that are added; null: none. `rounded`:
// contiguous rows that are written in bf16 instead; null: none.
struct Output {
  float* y;
  int64_t stride;
  const float* addend = nullptr;
  bf16* rounded = nullptr;
};

// What comes after a product: an activation, times the linear layer `gate` where there is one.
struct Activation {
  GluKind kind;
  bool rough;  // see EncoderKernels
  const Linear* gate;
};

// Checks a weight, fp32 or packed by encoder_pack. The bias is not set.
Linear linear_of(const Tensor& weight, int64_t depth, int64_t columns, const char* op,
                 const char* name);

// Whether fp32 weights of that many rows have to be packed.
bool needs_packing(int64_t rows);
// Floats that a packed fp32 weight takes; packs it.
int64_t packed_floats(const Linear& linear);
void pack(bool on_all, Linear& linear, int64_t first, int64_t columns, float* panels);

// Rounds the rows of an input, `depth` numbers each, to 8 bits or to bf16, where it has memory for
// that.
void round_rows(bool on_all, const Input& in, int64_t depth);
// bf16 rows in fp32.
void widen_rows(bool on_all, const bf16* x, int64_t rows, int64_t depth, float* out);

// Computes a linear layer, on all threads or on this one.
void multiply(bool on_all, const Linear& linear, const Input& in, const Output& out,
              const Activation* activation = nullptr);

}  // namespace bert_unpad
