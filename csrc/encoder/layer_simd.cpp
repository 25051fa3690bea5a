// Products in 8 bits with exact sums, and activations in place.
//
// Activations are unsigned with a zero point of each row, so that x w = s_x s_w (q_x q_w - z q_w):
// what the zero point adds to a column's sum is known from the sum of its weights. Four products
// are added up at a time, by one instruction where the CPU has it (VNNI, i8mm), else by two
// products of 16 bits; both are exact.
#include "encoder/layer.h"

#include "gelu/activations_simd.h"

namespace bert_unpad::BERT_UNPAD_ISA {
namespace {

constexpr int kAhead = 2048;                                         // bytes of weights
constexpr int kRows = 6, kColumns = kVectorRegisters == 32 ? 4 : 2;  // of a tile of sums

// sum + the products of four unsigned numbers with four signed ones of each lane.
template <bool kDotProducts>
BU_INLINE i32v dot4(i32v sum, i32v four, i32v weights) {
#if defined(__AVX512F__)
  if constexpr (kDotProducts) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(four), "vm"(weights));
    return sum;
  } else {
    const auto products = [](i32v a, i32v b) __attribute__((always_inline)) {
      return (i32v)_mm512_madd_epi16((__m512i)a, (__m512i)b);
    };
    const i32v even = (i32v)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)weights, 8), 8);
    const i32v odd = (i32v)_mm512_srai_epi16((__m512i)weights, 8);
    return sum + products(four & 0x00ff00ff, even) +
           products((i32v)((u32v)four >> 8) & 0x00ff00ff, odd);
  }
#elif defined(__AVX2__)
  if constexpr (kDotProducts) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(four), "xm"(weights));
    return sum;
  }
  const auto products = [](i32v a, i32v b) __attribute__((always_inline)) {
    return (i32v)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  };
  const i32v even = (i32v)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)weights, 8), 8);
  const i32v odd = (i32v)_mm256_srai_epi16((__m256i)weights, 8);
  return sum + products(four & 0x00ff00ff, even) +
         products((i32v)((u32v)four >> 8) & 0x00ff00ff, odd);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (i32v)vusdotq_s32((int32x4_t)sum, (uint8x16_t)four, (int8x16_t)weights);
#else
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const i32v a = (four >> (8 * i)) & 0xff, w = (weights << (24 - 8 * i)) >> 24;
    sum += a * w;
  }
  return sum;
#endif
}

BU_INLINE i32v splat4(const uint8_t* four) { return i32v{} + load_bits<int32_t>(four); }

template <bool kDotProducts, int M, int N>
BU_INLINE void tile(const Int8ProductParams& p, int64_t row, const int8_t* weights,
                    int64_t column) {
  i32v sums[M][N] = {};
  const uint8_t* x = p.x.data + row * p.depth;
  for (int64_t k = 0; k < p.depth; k += 4, weights += 4 * kInt8Panel) {
    i32v w[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      w[j] = load_bits<i32v>(weights + 4 * kLanes * j);
      // The hardware's prefetchers stop at the end of a page.
      __builtin_prefetch(weights + 4 * kLanes * j + kAhead);
    }
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i) {
      const i32v four = splat4(x + i * p.depth + k);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sums[i][j] = dot4<kDotProducts>(sums[i][j], four, w[j]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) {
    const int64_t c = column + kLanes * j;
    const f32v scale = load(p.weight.scales + c), bias = load(p.bias + c);
    const i32v of_weights = load_bits<i32v>(p.weight.sums + c);
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i) {
      const i32v sum = sums[i][j] - of_weights * p.x.zeros[row + i];
      f32v y = __builtin_convertvector(sum, f32v) * (scale * splat(p.x.scales[row + i])) + bias;
      if (p.addend) y += load(p.addend + (row + i) * p.addend_stride + c);
      store(p.y + (row + i) * p.y_stride + c, y);
    }
  }
}

template <bool kDotProducts, int M, int N>
BU_INLINE void tile_rest(const Int8ProductParams& p, int64_t row, int64_t rows,
                         const int8_t* weights, int64_t column) {
  if constexpr (M > 0) {
    if (rows == M) return tile<kDotProducts, M, N>(p, row, weights, column);
    tile_rest<kDotProducts, M - 1, N>(p, row, rows, weights, column);
  }
}

template <bool kDotProducts, int N>
void tile_rows(const Int8ProductParams& p, int64_t row, int64_t rows, const int8_t* weights,
               int64_t column) {
  for (; rows >= kRows; rows -= kRows, row += kRows)
    tile<kDotProducts, kRows, N>(p, row, weights, column);
  tile_rest<kDotProducts, kRows - 1, N>(p, row, rows, weights, column);
}

template <bool kDotProducts>
void block(const Int8ProductParams& p, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  const int8_t* panel = p.weight.panels + column / kInt8Panel * kInt8Panel * p.depth;
  const int64_t end = column + columns;
  const auto weights = [&](int64_t c) { return panel + c % kInt8Panel * 4; };
  for (; column + kColumns * kLanes <= end; column += kColumns * kLanes)
    tile_rows<kDotProducts, kColumns>(p, row, rows, weights(column), column);
  for (; column < end; column += kLanes)
    tile_rows<kDotProducts, 1>(p, row, rows, weights(column), column);
}

void product(const Int8ProductParams& p, int64_t row, int64_t rows, int64_t column,
             int64_t columns) {
  (p.dot_products ? block<true> : block<false>)(p, row, rows, column, columns);
}

BU_INLINE void store_bytes(uint8_t* out, f32v whole) {
  const i32v v = __builtin_convertvector(whole, i32v);
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8((__m512i)v));
#else
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<uint8_t>(v[i]);
#endif
}

void quantize(const float* x, int64_t x_stride, int64_t rows, int64_t depth, Int8Rows out) {
  for (int64_t row = 0; row < rows; ++row, x += x_stride) {
    f32v low = {}, high = {}, total = {};
    for (int64_t k = 0; k < depth; k += kLanes) {
      const f32v v = load(x + k);
      low = vmin(v, low);
      high = vmax(v, high);
      total += v * 0.0f;  // NaN where a number is not finite
    }
    const float least = -reduce_max(-low), range = reduce_max(high) - least;
    const bool finite = reduce_add(total) == 0.0f && range < __builtin_inff();
    const float scale = range > 1e-30f ? range / 255.0f : 1.0f;
    const float factor = 1.0f / scale, zero = round_to_int(splat(-least * factor))[0];
    out.scales[row] = finite ? scale : __builtin_nanf("");
    out.zeros[row] = finite ? static_cast<int32_t>(zero) : 0;
    uint8_t* q = out.data + row * depth;
    for (int64_t k = 0; k < depth; k += kLanes) {
      const f32v v = round_to_int(load(x + k) * factor) + zero;
      store_bytes(q + k, finite ? vmin(vmax(v, f32v{}), splat(255.0f)) : f32v{});
    }
  }
}

template <class Activation>
void activate_rows(float* y, int64_t y_stride, const float* gate, int64_t gate_stride, int64_t rows,
                   int64_t columns) {
  for (int64_t row = 0; row < rows; ++row, y += y_stride) {
    const float* factors = gate ? gate + row * gate_stride : nullptr;
    for_strips(columns, [=](int64_t j, auto width) {
      auto v = Activation::value(load_strip(y + j, width));
      if (factors) v = v * load_strip(factors + j, width);
      store_strip(y + j, v, width);
    });
  }
}

template <class Precision>
void activate_with(GluKind kind, float* y, int64_t y_stride, const float* gate, int64_t gate_stride,
                   int64_t rows, int64_t columns) {
  const auto run = [&]<class Activation>() {
    activate_rows<Activation>(y, y_stride, gate, gate_stride, rows, columns);
  };
  switch (kind) {
    case GluKind::kGelu:
      return run.template operator()<Exact<Precision>>();
    case GluKind::kGeluTanh:
      return run.template operator()<Tanh<Precision>>();
    case GluKind::kSilu:
      return run.template operator()<Silu<Precision>>();
    case GluKind::kRelu:
      return run.template operator()<Relu<Precision>>();
  }
}

void activate(GluKind kind, bool rough, float* y, int64_t y_stride, const float* gate,
              int64_t gate_stride, int64_t rows, int64_t columns) {
  const auto with = rough ? activate_with<ShortPrecision> : activate_with<FullPrecision>;
  with(kind, y, y_stride, gate, gate_stride, rows, columns);
}

}  // namespace

extern const EncoderKernels encoder_kernels = {quantize, product, activate};

}  // namespace bert_unpad::BERT_UNPAD_ISA
