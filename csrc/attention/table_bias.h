// A position bias that is a table by distance, as T5's: what attention's backward kernels do for it
// where queries are consecutive, which needs no load for each score and no sums for each row.
//
// Scores of 16 rows, which a warp owns, and a tile of columns have 15 more distances than columns.
// What these add to scores lies in shared memory, a strip for each warp. For the table's gradient a
// warp adds up the score gradients of each distance, one lane a diagonal, in shared memory too; at
// its end a block adds up its warps' sums and those of the distances of a bucket. The order of
// additions depends on the data's coordinates alone.
#pragma once

#include "attention/score_bias.h"
#include "cuda/reduce.h"

namespace bert_unpad {

// Distances and buckets of tables that are taken: T5's are 257 and 32.
inline constexpr int kMostDistances = 272, kMostTableBuckets = 64;

BU_DEVICE bool takes_distances(const AttentionBiasLaunch& p) {
  return 2 * p.bias.reach < kMostDistances && p.args.query_positions == nullptr;
}

// Where the table by distance has a distance; further ones count as the last.
BU_DEVICE int place_of(const cuda::AttentionCudaBias& bias, int distance) {
  const int reach = bias.reach;
  return reach + (distance < -reach ? -reach : distance < reach ? distance : reach);
}

// A warp's strip for tiles of kTile columns; nothing where kUsed is false.
template <bool kUsed, int kTile>
struct DistanceStrip {
  static constexpr uint32_t kBytes = 0, kTableBytes = 0;
  BU_DEVICE DistanceStrip(const AttentionLaunch&, uint32_t, uint32_t) {}
  BU_DEVICE bool used() const { return false; }
  BU_DEVICE void load(int, int, int) const {}
  BU_DEVICE void fill(int) const {}
  template <int kStep, int kTiles>
  BU_DEVICE void add(float (&)[kTiles][4], float, int) const {}
};

template <int kTile>
class DistanceStrip<true, kTile> {
  const AttentionBiasLaunch& p_;
  const uint32_t first_, table_;
  // Worked out again at each use, as the thread's place is: there are no registers to keep it in.
  BU_DEVICE uint32_t at(uint32_t thread) const { return first_ + thread / 32 * kBytes; }

 public:
  static constexpr int kCount = kTile + 16;
  static constexpr uint32_t kBytes = 4 * kCount, kTableBytes = 4 * kMostDistances;

  // Those of the block's warps begin at offset `first`, the table by distance at `table`.
  BU_DEVICE DistanceStrip(const AttentionBiasLaunch& p, uint32_t first, uint32_t table)
      : p_(p), first_(first), table_(table) {}

  BU_DEVICE bool used() const {
    return takes_distances(p_) && p_.bias.query.p == nullptr && p_.bias.key.p == nullptr;
  }

  // A head's table, by the threads from `thread` on, of `threads`, who must synchronise after it.
  BU_DEVICE void load(int head, int thread, int threads) const {
    const int count = 2 * p_.bias.reach + 1;
    const float* from = p_.bias.distances + static_cast<int64_t>(head) * count;
    for (int place = thread; place < count; place += threads)
      store_shared<float>(table_ + 4 * place, load_global<float>(from + place) * kLog2e);
  }

  // `first`: the first distance. The warp must synchronise before the strip is read, and before it
  // is filled again.
  BU_DEVICE void fill(int first) const {
    const uint32_t thread = keep_in_register(threadIdx.x), to = at(thread);
#pragma unroll
    for (int i = 0; i < kCount; i += 32) {
      const int number = i + static_cast<int>(thread % 32);
      const float x = load_shared<float>(table_ + 4 * place_of(p_.bias, first + number));
      if (number < kCount) store_shared<float>(to + 4 * number, x);
    }
  }

  // To the scores of C tiles side by side, times `factor`, in base 2. `number`: that of row g and
  // column 2t of the first one; it grows by kStep, 1 or -1, with columns and falls so with rows.
  template <int kStep, int kTiles>
  BU_DEVICE void add(float (&s)[kTiles][4], float factor, int number) const {
    const uint32_t first = at(keep_in_register(threadIdx.x)) + 4 * number;
    const auto pair = [&](int n, int i) {
      return load_shared<float>(first + 4 * kStep * (8 * n + i));
    };
    float below[2] = {pair(-1, 0), pair(-1, 1)};  // of row g + 8: those of 8 columns before
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = pair(n, i);
        s[n][i] = fma(s[n][i], factor, x);
        s[n][2 + i] = fma(s[n][2 + i], factor, below[i]);
        below[i] = x;
      }
    }
  }
};

// The gradient of the table from a block's queries, 16 of each of 4 warps; nothing where kUsed is
// false.
template <bool kUsed, int kColumns = 16>
struct TableSums {
  static constexpr uint32_t kBytes = 0;
  BU_DEVICE TableSums(const AttentionLaunch&, uint32_t, uint32_t) {}
  BU_DEVICE bool used() const { return false; }
  BU_DEVICE void clear() const {}
  BU_DEVICE void add(int) const {}
  BU_DEVICE void write(uint32_t, int, float, uint32_t) const {}
};

template <int kColumns>
class TableSums<true, kColumns> {
  static constexpr uint32_t kOfWarp = 4 * kMostDistances;
  static constexpr int kWarps = 4, kShare = kMostDistances / kWarps;
  const AttentionBiasLaunch& p_;
  const GradientTile<kColumns> tile_;
  const uint32_t first_;
  float nearest_ = 0.0f, furthest_ = 0.0f;  // of distances that count as the first and the last

  BU_DEVICE uint32_t at(int warp, int place) const { return first_ + warp * kOfWarp + 4 * place; }

 public:
  static constexpr uint32_t kBytes = kWarps * kOfWarp;

  // The block's tiles begin at offset `tiles`, its sums at `first`.
  BU_DEVICE TableSums(const AttentionBiasLaunch& p, uint32_t tiles, uint32_t first)
      : p_(p), tile_(tiles), first_(first) {}

  BU_DEVICE bool used() const {
    return p_.bias.dquery_sums != nullptr && p_.bias.dquery == nullptr &&
           p_.bias.buckets <= kMostTableBuckets && takes_distances(p_);
  }

  // Before all else.
  BU_DEVICE void clear() const {
    tile_.clear();
    for (uint32_t place = threadIdx.x % 32; place < kMostDistances; place += 32)
      store_shared<float>(at(threadIdx.x / 32, place), 0.0f);
  }

  // The gradients in the warp's tile; `first`: the distance from its last row to its first column.
  BU_DEVICE void add(int first) {
    const int lane = threadIdx.x % 32, last = 2 * p_.bias.reach;
    sync_warp();
#pragma unroll
    for (int i = 0; i < kColumns + 15; i += 32) {
      const int number = i + lane;
      if (number >= kColumns + 15) continue;
      const float x = tile_.diagonal(number);
      const int place = place_of(p_.bias, first + number);
      if (place == 0) {
        nearest_ += x;
      } else if (place == last) {
        furthest_ += x;
      } else {
        const uint32_t sum = at(threadIdx.x / 32, place);
        store_shared<float>(sum, load_shared<float>(sum) + x);
      }
    }
    // Wider ones are put once for each barrier of the block.
    if constexpr (kColumns == 16) sync_warp();
  }

  // Writes the block's sums, times `factor`, to those of its first query, `token` of all, under one
  // head. All threads take part; `free`: where 4 * kWarps * kMostTableBuckets bytes are.
  BU_DEVICE void write(uint32_t token, int head, float factor, uint32_t free) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, last = 2 * p_.bias.reach;
    const float nearest = warp_sum(nearest_), furthest = warp_sum(furthest_);
    if (lane == 0) {  // in this order: one distance alone is the nearest
      store_shared<float>(at(warp, last), furthest);
      store_shared<float>(at(warp, 0), nearest);
    }
    sync_block();
    // A warp has a share of the places; buckets take the place of the second warp's sums.
    for (int place = warp * kShare + lane; place < (warp + 1) * kShare; place += 32) {
      float sum = load_shared<float>(at(0, place));
      for (int other = 1; other < kWarps; ++other) sum += load_shared<float>(at(other, place));
      store_shared<float>(at(0, place), sum);
      store_shared<int32_t>(at(1, place),
                            place <= last ? load_global<int32_t>(p_.bias.bucket + place) : -1);
    }
    sync_warp();
    float total[2] = {};  // of buckets lane and lane + 32
#pragma unroll 1
    for (int place = warp * kShare; place < (warp + 1) * kShare; place += 4) {
      const auto x = load_shared<Vector<float, 4>>(at(0, place));
      const auto bucket = load_shared<Vector<int32_t, 4>>(at(1, place));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (bucket.v[i] == lane) total[0] += x.v[i];
        if (bucket.v[i] == lane + 32) total[1] += x.v[i];
      }
    }
    for (int i = 0; i < 2; ++i)
      store_shared<float>(free + 4 * (warp * kMostTableBuckets + lane + 32 * i), total[i]);
    sync_block();
    const int bucket = threadIdx.x;
    if (bucket >= p_.bias.buckets) return;
    float sum = 0.0f;
    for (int other = 0; other < kWarps; ++other)
      sum += load_shared<float>(free + 4 * (other * kMostTableBuckets + bucket));
    store_global<float>(BucketRows(p_.bias.dquery_sums, p_, token, head).first + bucket,
                        sum * factor);
  }
};

}  // namespace bert_unpad
