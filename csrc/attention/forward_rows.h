// A warp's rows of the forward pass: queries, and the online softmax over the keys that they have
// seen so far.
#pragma once

#include "attention/dropout.h"
#include "attention/kernel_parts.h"
#include "attention/query_windows.h"
#include "attention/score_bias.h"

namespace bert_unpad {

// kRowTiles tiles of 16 queries. Scores come in steps of 16 keys.
template <class T, int kHeadDim, int kRowTiles, bool kDropout, bool kWindow, bool kBias>
struct ForwardRows {
  static_assert((!kWindow && !kBias) || kRowTiles == 1);
  template <int kSteps>
  using Scores = float[kRowTiles][kSteps][2][4];

  Operands<kHeadDim> operands;
  uint32_t q[kRowTiles][kHeadDim / 16][4];
  float o[kRowTiles][kHeadDim / 8][4];
  // The largest score so far of rows g and g + 8, before scaling; with a bias in base 2.
  float row_max[kRowTiles][2];
  float sum[kRowTiles][2];  // sum of the exponentials in this lane's columns
  RowRange seen[2];         // with a window: the keys that rows g and g + 8 see

  // The scores of 16 keys; `k_rows`: where the first key's step begins in shared memory.
  template <int kSteps>
  BU_DEVICE void score(Scores<kSteps>& s, uint32_t k_rows, int step) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[r][step][i / 4][i % 4] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t b[4];
      operands.b(b, k_rows, 16 * step, d);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        mma<T>(s[r][step][0], q[r][d], b[0], b[1]);
        mma<T>(s[r][step][1], q[r][d], b[2], b[3]);
      }
    }
  }

  // Hides those of a step's keys that rows do not see. `first_key`: of step 0, in the sequence;
  // `end`: the key after the last one that is there, from that on.
  template <int kSteps>
  BU_DEVICE void mask(Scores<kSteps>& s, int step, int first_key, int end) const {
    const int column = 16 * step + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = column + i / 4 * 8 + i % 2, half = i % 4 / 2;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        bool hidden = key >= end;
        if constexpr (kWindow) {
          const auto count = static_cast<uint32_t>(seen[half].end - seen[half].begin);
          hidden = static_cast<uint32_t>(first_key + key - seen[half].begin) >= count;
        }
        if (hidden) s[r][step][i / 4][i % 4] = -INFINITY;
      }
    }
  }

  // Takes in keys with these scores, of which `v_rows` are the values. `unit`: of a score;
  // `first_row`, `first_key`: in the sequence; skips(step): whether no row sees the step's keys.
  // overlap(step) is work that depends on nothing here: products to compute beside exponentials,
  // whose pipe is another one.
  template <int kSteps, class Skips, class Overlap>
  BU_DEVICE void softmax_step(Scores<kSteps>& s, uint32_t v_rows, float unit,
                              const AttentionDropout& dropout, int first_row, int first_key,
                              const Skips& skips, const Overlap& overlap) {
    float most[kRowTiles][2];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) most[r][half] = row_max[r][half];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (skips(step)) continue;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& x = most[r][i % 4 / 2];
          x = fmaxf(x, s[r][step][i / 4][i % 4]);
        }
    }
    overlap(0);
    Exponents e;
    rescale(e, most, unit);
#pragma unroll
    for (int first = 0; first < kSteps; first += 2) {  // 32 keys
      if (skips(first) && skips(first + 1)) continue;
      const bool draws = kDropout && (!kBias || dropout.draws());
      uint32_t weights[2][kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        Philox4 bits;
        if (draws) bits = dropout.draw(first_row / 16 + r, (first_key + 16 * first) / 32);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int step = first + half;
          if (skips(step)) continue;
          exponentiate(s[r][step], e, r, unit);
          pack_a<T>(weights[half][r], s[r][step][0], s[r][step][1]);
          if (draws) dropout.apply(weights[half][r], AttentionDropout::tile(bits, half != 0));
        }
        if (r == 0 && first + 1 < kSteps) overlap(first + 1);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (!skips(first + half)) add_values(weights[half], v_rows, first + half);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        sum[r][half] = fma(sum[r][half], e.scale[r][half], e.total[r][half]);
  }

  // Takes in 32 keys, and computes the scores of the 32 at `k_rows`.
  BU_DEVICE void softmax_step_and_score(Scores<2>& s, uint32_t v_rows, Scores<2>& next,
                                        uint32_t k_rows, float unit,
                                        const AttentionDropout& dropout, int first_row,
                                        int first_key) {
    softmax_step<2>(
        s, v_rows, unit, dropout, first_row, first_key, [](int) { return false; },
        [&](int step) { score<2>(next, k_rows, step); });
  }

 private:
  // For rows g and g + 8: what is subtracted from scaled scores, by what earlier sums are scaled,
  // and the sum of this lane's exponentials.
  struct Exponents {
    float offset[kRowTiles][2], scale[kRowTiles][2], total[kRowTiles][2];
  };

  // From the largest scores of this lane to those of the rows; rescales what was summed relative to
  // older ones.
  BU_DEVICE void rescale(Exponents& e, const float (&most)[kRowTiles][2], float unit) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float largest = quad_max(most[r][half]);
        // A row that has seen no key yet has no largest score.
        const float base = kWindow && largest == -INFINITY ? 0.0f : largest;
        e.scale[r][half] = exp2_approx((row_max[r][half] - base) * unit);
        e.offset[r][half] = base * unit;
        e.total[r][half] = 0.0f;
        row_max[r][half] = largest;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          o[r][n][2 * half] *= e.scale[r][half];
          o[r][n][2 * half + 1] *= e.scale[r][half];
        }
      }
    }
  }

  // Turns the scores of 16 keys into exponentials.
  BU_DEVICE static void exponentiate(float (&s)[2][4], Exponents& e, int r, float unit) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = s[i / 4][i % 4];
      x = exp2_approx(fma(x, unit, -e.offset[r][i % 4 / 2]));
      e.total[r][i % 4 / 2] += x;
    }
  }

  BU_DEVICE void add_values(const uint32_t (&weights)[kRowTiles][4], uint32_t v_rows, int step) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 16; ++n) {
      uint32_t b[4];
      operands.b_transposed(b, v_rows, 16 * step, n);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        mma<T>(o[r][2 * n], weights[r], b[0], b[1]);
        mma<T>(o[r][2 * n + 1], weights[r], b[2], b[3]);
      }
    }
  }
};

}  // namespace bert_unpad
