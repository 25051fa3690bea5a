// The kernels for AMX as plain functions, built by tests/ops/test_tiles.py with the model of tiles
// in tile_model.h and, where the CPU has AMX, with its instructions.
#include <cstdlib>
#include <initializer_list>

#include "attention/attention_bf16.cpp"
#include "encoder/product_bf16.cpp"
#include "linear/wgrad_bf16.cpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace amx = bert_unpad::BERT_UNPAD_ISA;
using bert_unpad::bf16;

// c [16, 16] += a [16, 32] b, b in pairs of rows.
EXPORT void tile_product(const void* a, const void* b, float* c) {
  const amx::TileRegisters tiles;
  amx::tile_load<0>(c, 64);
  amx::tile_load<1>(a, 64);
  amx::tile_load<2>(b, 64);
  amx::tile_multiply<0, 1, 2>();
  amx::tile_store<0>(c, 64);
}

// c [16, 16] += a [16, 64] b, b in fours of rows.
EXPORT void tile_product_bytes(const void* a, const void* b, int32_t* c) {
  const amx::TileRegisters tiles;
  amx::tile_load<0>(c, 64);
  amx::tile_load<1>(a, 64);
  amx::tile_load<2>(b, 64);
  amx::tile_multiply_bytes<0, 1, 2>();
  amx::tile_store<0>(c, 64);
}

// y [rows, columns] = x weight^T + bias + addend, a block of it. x [rows + 16, depth].
EXPORT void bf16_product(const bf16* x, const bf16* panels, const float* bias, const float* addend,
                         float* y, int64_t depth, int64_t width, int64_t row, int64_t rows,
                         int64_t column, int64_t columns) {
  const bert_unpad::Bf16ProductParams p{depth, x, panels, bias, addend, width, y, width, nullptr};
  amx::bf16_product_kernels.product(p, row, rows, column, columns);
}
EXPORT void int8_product(uint8_t* x, float* scales, int32_t* zeros, const int8_t* panels,
                         const float* weight_scales, const int32_t* weight_sums, const float* bias,
                         const float* addend, float* y, int64_t depth, int64_t width, int64_t row,
                         int64_t rows, int64_t column, int64_t columns) {
  const bert_unpad::Int8ProductParams p{
      true, depth, {x, scales, zeros}, {panels, weight_scales, weight_sums}, bias, addend, width,
      y,    width};
  amx::bf16_product_kernels.int8_product(p, row, rows, column, columns);
}

// One sequence with qkv, dqkv [tokens, 3, heads, head_dim], out, dout [tokens, heads, head_dim].
EXPORT void attention(const bf16* qkv, const bf16* dout, bf16* out, bf16* dqkv, float* lse,
                      int tokens, int heads, int head_dim, float scale, double dropout_p,
                      int64_t seed, int64_t offset) {
  using bert_unpad::Packed;
  const int64_t hidden = heads * head_dim;
  bert_unpad::AttentionCpuParams p{};
  p.dtype = bert_unpad::DType::kBFloat16;
  p.heads = p.kv_heads = heads;
  p.window = {-1, -1};
  p.head_dim = head_dim;
  p.scale = scale;
  p.keep_threshold = bert_unpad::keep_threshold(dropout_p);
  p.rng = bert_unpad::rng_key(seed, offset);
  p.q = Packed<const void>{qkv, 3 * hidden, head_dim};
  p.k = Packed<const void>{qkv + hidden, 3 * hidden, head_dim};
  p.v = Packed<const void>{qkv + 2 * hidden, 3 * hidden, head_dim};
  p.out = Packed<const void>{out, hidden, head_dim};
  p.dout = Packed<const void>{dout, hidden, head_dim};
  p.out_w = Packed<void>{out, hidden, head_dim};
  p.dq = Packed<void>{dqkv, 3 * hidden, head_dim};
  p.dk = Packed<void>{dqkv + hidden, 3 * hidden, head_dim};
  p.dv = Packed<void>{dqkv + 2 * hidden, 3 * hidden, head_dim};
  p.lse = lse;
  p.q_tokens = tokens;
  const auto& kernels = amx::attention_bf16_kernels;
  for (const bool backward : {false, true})
    for (int head = 0; head < heads; ++head) {
      const bert_unpad::AttentionTask task{0, head, 0, 0, tokens, tokens, 0, tokens, 0, tokens};
      const int64_t floats = kernels.scratch(p, task, backward);
      auto* scratch = static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64));
      (backward ? kernels.backward : kernels.forward)(p, task, scratch);
      std::free(scratch);
    }
}

// `scratch` has depth * (out + in) bf16, where depth is tokens rounded up to 32.
EXPORT void weight_gradient(const bf16* dy, const bf16* x, int64_t tokens, int64_t out, int64_t in,
                            bool accumulate, float* dweight, float* dbias, bf16* scratch) {
  bert_unpad::WgradCpuParams p{dy, x, tokens, out, in, dweight, accumulate};
  p.depth = (tokens + 31) / 32 * 32;
  p.dy_tiles = scratch;
  p.x_panels = scratch + p.depth * out;
  amx::wgrad_bf16_kernels.rearrange(p, 0, p.depth, dbias);
  amx::wgrad_bf16_kernels.block(p, {0, out, 0, in});
}
