// Launches of the kernels with a LayerNorm: which kernel takes a shape, and with which blocks.
#pragma once

#include "cuda/capability.h"
#include "cuda/column_scratch.h"
#include "cuda/launch.h"
#include "cuda/norm_row_general.h"

namespace bert_unpad::cuda {

inline constexpr int kLongestWideRow = 4096;

// Threads of a block, and how many blocks share an SM: few enough that no kernel spills, and no
// more than fill the device. kWarpRows: rows at once where a warp holds one.
template <int kVectors, bool kBlockRow, int kWarpRows = 4>
struct RowBlock {
  static constexpr bool kGeneral = kVectors == 0;
  static constexpr int kThreads = kGeneral ? 128 : 32 * (kBlockRow ? kMaxRowWarps : kWarpRows);

  static dim3 block(int64_t hidden) {
    if (kGeneral) return dim3(kThreads);
    constexpr int kWarpColumns = 32 * kVectors * kGroup;
    if (kBlockRow)
      return dim3(static_cast<unsigned>((hidden + kWarpColumns - 1) / kWarpColumns) * 32);
    return dim3(32, kWarpRows);
  }
  // Blocks that take every so-many-th row, or group of rows.
  static dim3 grid(const RowNormParams& p, int blocks_per_sm, const char* op) {
    const int64_t at_once = kBlockRow ? 1 : kWarpRows;
    // A block for long rows may be smaller than it is allowed to be.
    const int64_t smaller = kThreads / static_cast<int64_t>(block(p.hidden).x * block(p.hidden).y);
    const int64_t fill = static_cast<int64_t>(sm_count(op)) * blocks_per_sm * smaller;
    return dim3(static_cast<unsigned>(std::min((p.rows + at_once - 1) / at_once, fill)));
  }
};

// In the backward pass a thread has up to 32 columns with three sums each. The rows of few large
// blocks are added up in shared memory: each block adds a row to `partials`.
template <int kVectors, bool kBlockRow>
struct BackwardBlock : RowBlock<kVectors, kBlockRow, 8> {
  static constexpr int kBlocks = kVectors == 0 ? 4 : kBlockRow || kVectors > 1 ? 1 : 2;
};

// In the forward pass; kOperands: tensors that a row is made of.
template <int kVectors, bool kBlockRow, int kOperands>
inline constexpr int kForwardBlocks = kVectors == 0   ? 6
                                      : kBlockRow     ? 1
                                      : kOperands > 2 ? (kVectors == 1 ? 6 : 3)
                                                      : (kVectors == 1 ? 8 : 4);

// f.operator()<kVectors, kBlockRow>(). `aligned`: all activations lie at multiples of 16 bytes.
// T: what the operands are made of; of fp32 a thread cannot hold several groups.
template <class T, class F>
auto dispatch_row(const RowNormParams& p, bool aligned, const F& f) {
  if (!aligned || p.hidden % kGroup != 0 || p.hidden > kLongestWideRow)
    return f.template operator()<0, true>();
  if (p.hidden <= 256) return f.template operator()<1, false>();
  if constexpr (sizeof(T) == 2) {
    if (p.hidden <= 768) return f.template operator()<3, false>();
    if (p.hidden <= 1024) return f.template operator()<4, false>();
  }
  return f.template operator()<1, true>();
}

// What `partials` and `tickets` are.
template <class T>
ColumnScratch row_scratch(const RowNormParams& p, bool aligned, const char* op) {
  return dispatch_row<T>(p, aligned, [&]<int kVectors, bool kBlockRow>() -> ColumnScratch {
    using Block = BackwardBlock<kVectors, kBlockRow>;
    return column_scratch(Block::grid(p, Block::kBlocks, op).x, kSumsAtOnce);
  });
}

// Bytes of shared memory for a thread's next row of so many operands; see NextGroups.
template <int kVectors, bool kBlockRow, class Params>
uint32_t ahead_bytes(const Params& p, dim3 block, int operands, const char* op) {
  if constexpr (Params::kCopiedAhead && kVectors > 0 && !kBlockRow) {
    if (p.norm.dtype != DType::kFloat32 && compute_capability(op) >= 80)
      return NextGroups::bytes(static_cast<int>(block.x * block.y), kVectors * operands);
  }
  return 0;
}

// kernel(params) with the blocks of a forward or backward pass.
template <int kVectors, bool kBlockRow, class Params>
void launch_forward_rows(const char* op, void (*kernel)(Params), const Params& p,
                         cudaStream_t stream) {
  using Block = RowBlock<kVectors, kBlockRow>;
  const dim3 block = Block::block(p.norm.hidden);
  const uint32_t shared =
      kVectors == 0 ? RowSum<true>::kBytes
                    : forward_shared_bytes<kBlockRow>(p.norm.hidden) +
                          ahead_bytes<kVectors, kBlockRow>(p, block, Params::kRowOperands, op);
  launch(op, kernel,
         Block::grid(p.norm, kForwardBlocks<kVectors, kBlockRow, Params::kRowOperands>, op), block,
         shared, stream, p);
}

template <int kVectors, bool kBlockRow, class Params>
void launch_backward_rows(const char* op, void (*kernel)(Params), const Params& p,
                          cudaStream_t stream) {
  using Block = BackwardBlock<kVectors, kBlockRow>;
  const dim3 block = Block::block(p.norm.hidden);
  const uint32_t shared =
      kVectors == 0 ? RowSum<true>::kBytes
                    : backward_shared_bytes<kBlockRow>(p.norm.hidden, block.y) +
                          ahead_bytes<kVectors, kBlockRow>(p, block, Params::kRowOperands + 1, op);
  launch(op, kernel, Block::grid(p.norm, Block::kBlocks, op), block, shared, stream, p);
}

}  // namespace bert_unpad::cuda
