// The gradient of a linear layer's weight in fp32. Each block of it goes through the tokens in
// pieces whose operands and sums stay in the second-level cache; nothing is transposed, because the
// product reads its left-hand side number by number (cpu/gemm_simd.h).
#include "linear/wgrad.h"

#include <cstring>

#include "cpu/gemm_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

// Rows and columns of a block: whole tiles of the product.
constexpr int kBlock = 192;
constexpr int kDepth = 128;           // tokens of a piece
constexpr int kStride = kBlock + 16;  // spreads rows of a piece over the sets of the cache
constexpr int64_t kScratch = static_cast<int64_t>(kDepth) * (kStride + kBlock);
static_assert(kBlock % kTileRows == 0 && kBlock % kPanel == 0);

// Copies dy [depth, rows] and adds up its columns.
void copy_piece(const float* dy, int64_t stride, int depth, int64_t rows, float* out, float* sums) {
  for (int64_t j = 0; j < rows; j += kLanes) {
    f32v sum = {};
    for (int t = 0; t < depth; ++t) {
      const f32v v = load(dy + t * stride + j);
      store(out + t * kStride + j, v);
      sum += v;
    }
    if (sums) store(sums + j, load(sums + j) + sum);
  }
}

void block(const WgradCpuParams& p, const WgradBlock& b, float* sums, float* scratch) {
  float *dy = scratch, *x = scratch + kDepth * kStride;
  if (sums) std::memset(sums + b.row, 0, b.rows * sizeof(float));
  int64_t first = 0;
  do {
    const int depth = static_cast<int>(p.tokens - first < kDepth ? p.tokens - first : kDepth);
    copy_piece(static_cast<const float*>(p.dy) + first * p.out + b.row, p.out, depth, b.rows, dy,
               sums ? sums + b.row : nullptr);
    pack(static_cast<const float*>(p.x) + first * p.in + b.column, p.in, depth,
         static_cast<int>(b.columns), 1.0f, x);
    gemm({dy, 1, kStride}, static_cast<int>(b.rows), static_cast<int>(b.columns), depth,
         {x, panel_size(depth)}, p.dweight + b.row * p.in + b.column, p.in,
         p.accumulate || first > 0);
    first += depth;
  } while (first < p.tokens);
}

}  // namespace

extern const WgradFp32Kernels wgrad_fp32_kernels = {kBlock, kScratch, block};

}  // namespace bert_unpad::BERT_UNPAD_ISA
