// The gradient of a linear layer's weight, dy^T x, in bf16 with fp32 sums, on CPUs that multiply
// bf16.
//
// Libraries transpose dy in a pass of its own and give bf16 results. Here one pass over dy and x
// rearranges both for the product and adds up dy's columns, the bias's gradient; the product goes
// straight into the fp32 gradient.
#include "linear/wgrad.h"

#include "cpu/columns_simd.h"
#include "cpu/gemm_bf16.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

#if defined(BU_AMX)
constexpr int64_t kBlock = 256;
constexpr int kDepth = 1 << 20;  // sums stay in the tiles' registers
#else
constexpr int64_t kBlock = 4 * kBlockPanels * kPairColumns;  // whole blocks of the product
constexpr int kDepth = 384;  // of a piece, whose panels stay in the first-level cache
#endif

// Column by column, the pairs of tokens t and t + 1; zeros after the last token.
BU_INLINE Words pairs(const bf16* x, int64_t t, const WgradCpuParams& p, int64_t width) {
  const uint32_t first = t < p.tokens ? 0xffffu : 0u, second = t + 1 < p.tokens ? 0xffffu : 0u;
  return load_pairs(x + t * width, first, x + (t + 1) * width, second);
}

void add_columns(const bf16* dy, int64_t begin, int64_t end, const WgradCpuParams& p, float* sums) {
  for (int64_t c = 0; c < p.out; c += kLanes) {
    f32v sum = {};
    for (int64_t t = begin; t < end; ++t) sum += load(dy + t * p.out + c);
    store(sums + c, load(sums + c) + sum);
  }
}

void rearrange(const WgradCpuParams& p, int64_t begin, int64_t end, float* sums) {
  const auto* dy = static_cast<const bf16*>(p.dy);
  const auto* x = static_cast<const bf16*>(p.x);
  if (sums)
    for (int64_t c = 0; c < p.out; c += kLanes) store(sums + c, f32v{});
  for (int64_t t = begin; t < end; t += 32) {
    if (sums) add_columns(dy, t, t + 32 < p.tokens ? t + 32 : p.tokens, p, sums);
    for (int64_t c = 0; c < p.out; c += 16) {
      Words columns[16];
      for (int i = 0; i < 16; ++i) columns[i] = pairs(dy + c, t + 2 * i, p, p.out);
      transpose16(columns);
      bf16* out = p.dy_tiles + c * p.depth + 16 * t;
      for (int i = 0; i < 16; ++i) store_bits(out + 32 * i, columns[i]);
    }
    for (int64_t c = 0; c < p.in; c += 16) {
      bf16* out = p.x_panels + c * p.depth + t * kPairColumns;
      for (int i = 0; i < 16; ++i)
        store_bits(out + 2 * kPairColumns * i, pairs(x + c, t + 2 * i, p, p.in));
    }
  }
}

void block(const WgradCpuParams& p, const WgradBlock& b) {
  const TileRegisters tiles;
  int64_t first = 0;
  do {
    const int depth = static_cast<int>(p.depth - first < kDepth ? p.depth - first : kDepth);
    gemm_bf16(Bf16Rows::tiles(p.dy_tiles + b.row * p.depth + 16 * first, 16 * p.depth),
              static_cast<int>(b.rows),
              {p.x_panels + b.column * p.depth + first * kPairColumns, p.depth * kPairColumns},
              static_cast<int>(b.columns), depth, p.dweight + b.row * p.in + b.column, p.in,
              p.accumulate || first > 0);
    first += depth;
  } while (first < p.depth);
}

}  // namespace

extern const WgradBf16Kernels wgrad_bf16_kernels = {kBlock, rearrange, block};

}  // namespace bert_unpad::BERT_UNPAD_ISA
