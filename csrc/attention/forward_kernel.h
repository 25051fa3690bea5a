// The forward pass on tensor cores: softmax(q k^T * scale), dropout, times v, with the softmax
// rescaled as it goes (Dao, "FlashAttention-2", 2023).
//
// A block of 4 warps takes 64 * kRowTiles queries of one head, a warp 16 * kRowTiles of them; keys
// and values come in tiles of 64, one on its way while the last is used. Two row tiles a warp halve
// what it reads from shared memory per product (128 bytes a clock, the limit at one). What a row
// gets does not depend on kRowTiles.
#pragma once

#include "attention/dropout.h"
#include "attention/kernel_parts.h"

namespace bert_unpad {

inline constexpr int kForwardWarps = 4, kForwardKeys = 64;

template <int kHeadDim>
inline constexpr uint32_t kForwardShared = 4 * SharedTile<kHeadDim>::bytes(kForwardKeys);

template <class T, int kHeadDim, int kRowTiles, bool kDropout>
BU_KERNEL(32 * kForwardWarps, 2)
attention_forward_kernel(BU_PARAMS AttentionLaunch p) {
  constexpr int kThreads = 32 * kForwardWarps, kKeys = kForwardKeys, kSteps = kKeys / 16;
  constexpr uint32_t kTile = SharedTile<kHeadDim>::bytes(kKeys);
  const AttentionBlock block = attention_block(p);
  const int block_row = block.tile * kForwardWarps * 16 * kRowTiles;
  if (block_row >= block.q_len) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = block_row + warp * 16 * kRowTiles;
  const HeadRows<const T> k(p.args.k, block.k_begin, block.head);
  const HeadRows<const T> v(p.args.v, block.k_begin, block.head);
  const auto copy_keys = [&](int tile) {
    const uint32_t stage = tile % 2 * 2 * kTile;
    copy_tile<kKeys, kThreads, kHeadDim>(stage, k, tile * kKeys, block.k_len);
    copy_tile<kKeys, kThreads, kHeadDim>(stage + kTile, v, tile * kKeys, block.k_len);
  };
  const int tiles = (block.k_len + kKeys - 1) / kKeys;
  if (tiles > 0) copy_keys(0);
  copy_async_commit();

  // The maximum is taken before scores are scaled, so the scale must be positive: q gets its sign.
  const float scale = fabsf(p.args.scale) * kLog2e;
  uint32_t q[kRowTiles][kHeadDim / 16][4];
  {
    const HeadRows<const T> rows(p.args.q, block.q_begin, block.head);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      load_a<kHeadDim>(q[r], rows, first_row + 16 * r, block.q_len,
                       p.args.scale < 0.0f ? kNegatePair : 0u);
  }
  [[maybe_unused]] const AttentionDropout dropout(p.args.rng, p.args.keep_threshold,
                                                  block.sequence * p.args.heads + block.head);
  float o[kRowTiles][kHeadDim / 8][4] = {};
  float top[kRowTiles][2], sum[kRowTiles][2];  // of rows g and g + 8; sum: this lane's columns
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    top[r][0] = top[r][1] = -INFINITY;
    sum[r][0] = sum[r][1] = 0.0f;
  }

  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<0>();
    sync_block();  // the tile is there for all, and all are done with the one before it
    if (tile + 1 < tiles) copy_keys(tile + 1);
    copy_async_commit();
    if (first_row >= block.q_len) continue;

    const uint32_t k_tile = tile % 2 * 2 * kTile, v_tile = k_tile + kTile;
    const int left = block.k_len - tile * kKeys;  // keys from here on
    float s[kRowTiles][kSteps][2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (16 * step < left) {
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; ++d) {
          uint32_t b[4];
          load_b<kHeadDim>(b, k_tile, 16 * step, d);
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            mma<T>(s[r][step][0], q[r][d], b[0], b[1]);
            mma<T>(s[r][step][1], q[r][d], b[2], b[3]);
          }
        }
      }
    }
    if (left < kKeys) {
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (8 * n + 2 * (lane % 4) + i % 2 >= left) {
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) s[r][n / 2][n % 2][i] = -INFINITY;
          }
        }
      }
    }

#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = top[r][half];
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n)
          most = fmaxf(most, fmaxf(s[r][n / 2][n % 2][2 * half], s[r][n / 2][n % 2][2 * half + 1]));
        most = quad_max(most);
        const float shrink = exp2_approx((top[r][half] - most) * scale);
        top[r][half] = most;
        const float offset = most * scale;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            float& x = s[r][n / 2][n % 2][i];
            x = exp2_approx(fma(x, scale, -offset));
            total += x;
          }
        }
        sum[r][half] = fma(sum[r][half], shrink, total);
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          o[r][n][2 * half] *= shrink;
          o[r][n][2 * half + 1] *= shrink;
        }
      }
    }

#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (16 * step < left) {
        uint32_t weights[kRowTiles][4];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          if constexpr (kDropout)
            dropout.apply(s[r][step], first_row / 16 + r, tile * kSteps + step);
          pack_a<T>(weights[r], s[r][step][0], s[r][step][1]);
        }
#pragma unroll
        for (int n = 0; n < kHeadDim / 16; ++n) {
          uint32_t b[4];
          load_b_transposed<kHeadDim>(b, v_tile, 16 * step, n);
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            mma<T>(o[r][2 * n], weights[r], b[0], b[1]);
            mma<T>(o[r][2 * n + 1], weights[r], b[2], b[3]);
          }
        }
      }
    }
  }
  if (first_row >= block.q_len) return;

  const HeadRows<T> out(p.args.out_w, block.q_begin, block.head);
  float* lse = p.args.lse + block.head * p.args.q_tokens + block.q_begin;
  const float keep = kDropout ? keep_scale(p.args.keep_threshold) : 1.0f;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_sum(sum[r][half]);
      factor[half] = total > 0.0f ? keep / total : total;  // 0 without keys; a NaN stays one
      const int row = first_row + 16 * r + 8 * half + lane / 4;
      if (lane % 4 == 0 && row < block.q_len)
        store_global<float>(lse + row, (top[r][half] * scale + log2f(total)) * kLn2);
    }
    store_rows<T>(o[r], factor[0], factor[1], out, first_row + 16 * r, block.q_len, 0);
  }
}

}  // namespace bert_unpad
