// The gradient of a linear layer's weight, dy^T x, in bf16 with fp32 sums, on CPUs with AMX.
//
// Libraries transpose dy in a pass of its own and give bf16 results. Here one pass over dy and x
// rearranges both for the tiles and adds up dy's columns, the bias's gradient; the product goes
// straight into the fp32 gradient.
#include "linear/wgrad.h"

#include "cpu/gemm_bf16.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

// 32 numbers of a row, or zeros after the last token.
BU_INLINE __m512i row_or_zeros(const bf16* x, int64_t token, const WgradCpuParams& p,
                               int64_t width) {
  return token < p.tokens ? load_bits<__m512i>(x + token * width) : _mm512_setzero_si512();
}

// Pairs of a and b for columns 0 to 15, and for 16 to 31.
BU_INLINE void pair_rows(__m512i a, __m512i b, __m512i& low, __m512i& high) {
  low = interleave(_mm512_castsi512_si256(a), _mm512_castsi512_si256(b));
  high = interleave(_mm512_shuffle_i64x2(a, b, 0xee));
}

BU_INLINE void add_columns(__m512i row, f32v& low, f32v& high) {
  low += widen_bf16((u16v)_mm512_castsi512_si256(row));
  high += widen_bf16((u16v)_mm512_extracti64x4_epi64(row, 1));
}

void rearrange(const WgradCpuParams& p, int64_t begin, int64_t end, float* sums) {
  if (sums)
    for (int64_t c = 0; c < p.out; c += 16) store(sums + c, f32v{});
  for (int64_t t = begin; t < end; t += 32) {
    for (int64_t c = 0; c < p.out; c += 32) {
      __m512i low[16], high[16];
      f32v low_sum = {}, high_sum = {};
      for (int i = 0; i < 16; ++i) {
        const __m512i a = row_or_zeros(p.dy + c, t + 2 * i, p, p.out);
        const __m512i b = row_or_zeros(p.dy + c, t + 2 * i + 1, p, p.out);
        add_columns(a, low_sum, high_sum);
        add_columns(b, low_sum, high_sum);
        pair_rows(a, b, low[i], high[i]);
      }
      if (sums) {
        store(sums + c, load(sums + c) + low_sum);
        store(sums + c + 16, load(sums + c + 16) + high_sum);
      }
      bf16* out = p.dy_tiles + c * p.depth + 16 * t;
      transpose16(low);
      for (int i = 0; i < 16; ++i) store_bits(out + 32 * i, low[i]);
      transpose16(high);
      for (int i = 0; i < 16; ++i) store_bits(out + 16 * p.depth + 32 * i, high[i]);
    }
    for (int64_t c = 0; c < p.in; c += 32) {
      bf16* out = p.x_panels + c * p.depth + t * kPairColumns;
      for (int i = 0; i < 16; ++i, out += 2 * kPairColumns) {
        __m512i low, high;
        pair_rows(row_or_zeros(p.x + c, t + 2 * i, p, p.in),
                  row_or_zeros(p.x + c, t + 2 * i + 1, p, p.in), low, high);
        store_bits(out, low);
        store_bits(out + p.depth * kPairColumns, high);
      }
    }
  }
}

void block(const WgradCpuParams& p, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const TileRegisters tiles;
  gemm_bf16(Bf16Rows::tiles(p.dy_tiles + row * p.depth, 16 * p.depth), static_cast<int>(rows),
            {p.x_panels + column * p.depth, p.depth * kPairColumns}, static_cast<int>(columns),
            static_cast<int>(p.depth), p.dweight + row * p.in + column, p.in, p.accumulate);
}

}  // namespace

extern const WgradKernels wgrad_kernels = {rearrange, block};

}  // namespace bert_unpad::BERT_UNPAD_ISA
