// What the attention kernels share: which part of the batch a block works on, and how tiles and
// fragments get into and out of shared memory and registers.
#pragma once

#include <type_traits>

#include "attention/attention_cuda.h"
#include "attention/cu_seqlens_errors.h"
#include "cuda/architecture.h"
#include "cuda/math.h"
#include "cuda/primitives.h"
#include "cuda/reduce.h"
#include "cuda/site.h"
#include "cuda/swizzle.h"
#include "cuda/vector.h"

namespace bert_unpad {

inline constexpr uint32_t kNegatePair = 0x80008000u;  // the signs of two 16-bit numbers
inline constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;

// A launch: blocks take `tiles` tiles of each head of the sequences order[first], order[first + 1],
// ...; all tiles of a head, then all heads of a sequence are neighbours, so that the rows they
// share are in L2.
struct AttentionLaunch {
  cuda::AttentionCudaParams args;
  int first, tiles;
  int group;   // query heads that read one head of keys and values
  float unit;  // of a score in base 2: scale * log2(e)
  float keep;  // what dropout multiplies the kept weights by; 1 without dropout
};

// The same with a position bias. Kernels are compiled for one or the other, so that those without a
// bias know nothing of it.
struct AttentionBiasLaunch : AttentionLaunch {
  cuda::AttentionCudaBias bias;
  int first_column;  // of dk and dv that this launch computes, see kKeyColumns
};

template <class Launch>
inline constexpr bool kHasBias = std::is_same_v<Launch, AttentionBiasLaunch>;

// Whether tensor cores of the architecture that is compiled for do not multiply T.
template <class T>
inline constexpr bool kNoProducts = kTuring && std::is_same_v<T, bf16>;

// What one block works on. A block of keys has the first of the query heads that read them. Tokens
// are fewer than 2^31; without a sign they need no second register where they become 64 bits.
struct AttentionBlock {
  int tile, head, kv_head, sequence;
  uint32_t q_begin, k_begin;  // first token
  int q_len, k_len;
};

// A number that is the same for all lanes of a warp, so that the compiler may keep it, and what
// depends on it, in uniform registers.
BU_DEVICE int of_warp(int number) {
  return static_cast<int>(first_lane(static_cast<uint32_t>(number)));
}
BU_DEVICE int warp_number() { return of_warp(static_cast<int>(threadIdx.x) / 32); }

// cu_seqlens is only known on the device: it is checked here, and what does not fit stops the
// kernel before anything is read.
BU_DEVICE void check_run(int begin, int end, int longest, int64_t tokens, bool first, bool last) {
  BU_REQUIRE(begin <= end, "cu_seqlens " BU_CU_SEQLENS_ORDER);
  BU_REQUIRE(end - begin <= longest, "cu_seqlens " BU_CU_SEQLENS_LONGEST);
  BU_REQUIRE(!first || begin == 0, "cu_seqlens " BU_CU_SEQLENS_START);
  BU_REQUIRE(begin >= 0 && (last ? end == tokens : end <= tokens), "cu_seqlens " BU_CU_SEQLENS_END);
}

// The same for a row of `order` with 4 columns, which says again what is in cu_seqlens.
BU_DEVICE void check_row(const Vector<int32_t, 4>& row, const int32_t* cu_seqlens) {
  const int begin = load_global<int32_t>(cu_seqlens + row.v[0]);
  const int end = load_global<int32_t>(cu_seqlens + row.v[0] + 1);
  // One branch for all three, before the caller uses the row: otherwise some kernels take more
  // registers, and one spills on sm_75.
  const bool same = (row.v[1] == begin) & (row.v[2] == end - begin) & (row.v[3] == 0);
  BU_REQUIRE(same, BU_ORDER_ROW ", as cu_seqlens has them");
}

// kKeys: the grid has a block per head of keys, not of queries.
template <bool kKeys = false>
BU_DEVICE AttentionBlock attention_block(const AttentionLaunch& p) {
  const cuda::AttentionCudaParams& a = p.args;
  const unsigned tiles = p.tiles, heads = kKeys ? a.kv_heads : a.heads;
  AttentionBlock b;
  b.tile = static_cast<int>(blockIdx.x % tiles);
  const unsigned head = blockIdx.x / tiles % heads, group = p.group;
  b.head = static_cast<int>(kKeys ? head * group : head);
  b.kv_head = static_cast<int>(kKeys ? head : head / group);
  const int place = p.first + static_cast<int>(blockIdx.x / tiles / heads);
  int q0, q1, k0, k1;
  const auto check_sequence = [&] {
    BU_REQUIRE(b.sequence >= 0 && b.sequence < a.sequences, "order must hold sequence numbers");
  };
  if (a.order != nullptr && a.order_columns == 4) {
    const auto row = load_global<Vector<int32_t, 4>>(a.order + 4 * int64_t{place});
    b.sequence = row.v[0];
    check_sequence();
    // By one block of a sequence, so that the others do not wait for two more loads.
    if (b.tile == 0 && head == 0) check_row(row, a.cu_k);
    q0 = k0 = row.v[1];
    q1 = k1 = row.v[1] + row.v[2];
  } else {
    b.sequence = a.order == nullptr ? place : load_global<int32_t>(a.order + place);
    check_sequence();
    q0 = load_global<int32_t>(a.cu_q + b.sequence);
    q1 = load_global<int32_t>(a.cu_q + b.sequence + 1);
    k0 = load_global<int32_t>(a.cu_k + b.sequence);
    k1 = load_global<int32_t>(a.cu_k + b.sequence + 1);
  }
  const bool first = b.sequence == 0, last = b.sequence + 1 == a.sequences;
  check_run(q0, q1, a.max_q, a.q_tokens, first, last);
  check_run(k0, k1, a.max_k, a.k_tokens, first, last);
  b.q_begin = q0;
  b.q_len = q1 - q0;
  b.k_begin = k0;
  b.k_len = k1 - k0;
  return b;
}

// The same, known to the compiler to be that of all lanes: then it needs no registers of theirs.
BU_DEVICE AttentionBlock uniform(AttentionBlock b) {
  for (int* x : {&b.tile, &b.head, &b.kv_head, &b.sequence, &b.q_len, &b.k_len}) *x = of_warp(*x);
  for (uint32_t* x : {&b.q_begin, &b.k_begin}) *x = first_lane(*x);
  return b;
}

// The same, whose `members` the compiler does not know any more: what depends on them is worked out
// again, and no registers keep it.
template <class... Members>
BU_DEVICE AttentionBlock again(AttentionBlock b, Members... members) {
  const auto forget = [](auto& x) {
    x = static_cast<std::decay_t<decltype(x)>>(keep_in_register(static_cast<uint32_t>(x)));
  };
  (forget(b.*members), ...);
  return b;
}

// What a block works on, for where it is needed again. kShared: meanwhile it waits in shared
// memory, at offset `at`, because on Blackwell ptxas has no registers left to keep it in.
template <bool kShared = kBlackwell>
class KeptBlock {
  const AttentionBlock& block_;
  const uint32_t at_;

 public:
  static constexpr uint32_t kBytes = sizeof(AttentionBlock);

  // All threads of the block take part.
  BU_DEVICE KeptBlock(const AttentionBlock& block, uint32_t at) : block_(block), at_(at) {
    if constexpr (kShared) {
      if (threadIdx.x == 0) store_shared(at, block);
      sync_block();
    }
  }

  BU_DEVICE AttentionBlock get() const {
    if constexpr (kShared)
      return load_shared<AttentionBlock>(at_);
    else
      return block_;
  }
};

// Rows of one head, from a token on.
template <class T>
struct HeadRows {
  T* p;
  int64_t stride;  // elements from row to row

  template <class U>
  BU_DEVICE HeadRows(const Packed<U>& all, int64_t token, int head)
      : p(static_cast<T*>(all.p) + token * all.token_stride + head * all.head_stride),
        stride(all.token_stride) {}

  BU_DEVICE T* at(int row, int column) const { return p + row * stride + column; }
};

// Starts copying kRows rows from `first` on into a swizzled tile; rows from `end` on are zeros.
// `thread`: this one's number in the block.
template <int kRows, int kThreads, int kColumns, class T>
BU_DEVICE void copy_tile(uint32_t tile, const HeadRows<const T>& rows, int first, int end,
                         uint32_t thread = threadIdx.x BU_SITE) {
  using Tile = SharedTile<kColumns>;
  // Neighbouring threads copy neighbouring pieces of a row: all of them, or 4 where a row has 12.
  constexpr int kPieces = Tile::kPieces == 12 ? 4 : Tile::kPieces;
  constexpr int kStep = kThreads / kPieces;  // rows between a thread's copies
  static_assert(kRows % kStep == 0 && kStep % 8 == 0, "a thread's copies share one swizzle");
  const int row = thread / kPieces, piece = thread % kPieces;
  const uint32_t to = tile + Tile::offset(row, piece);
  const T* from = rows.at(first + row, 8 * piece);
#pragma unroll
  for (int i = 0; i < kRows; i += kStep, from += kStep * rows.stride) {
#pragma unroll
    for (int more = 0; more < Tile::kPieces; more += kPieces)
      copy_async_16(to + Tile::bytes(i) + 16 * more, from + 8 * more,
                    first + row + i < end BU_FROM_SITE);
  }
}

// The same for kColumns columns in tiles of kTileColumns, one after the other.
template <int kRows, int kThreads, int kColumns, int kTileColumns, class T>
BU_DEVICE void copy_tiles(uint32_t tile, const HeadRows<const T>& rows, int first, int end,
                          uint32_t thread = threadIdx.x BU_SITE) {
  copy_tile<kRows, kThreads, kTileColumns>(tile, rows, first, end, thread BU_FROM_SITE);
  if constexpr (kColumns > kTileColumns) {
    auto others = rows;
    others.p += kTileColumns;
    copy_tiles<kRows, kThreads, kColumns - kTileColumns, kTileColumns>(
        tile + SharedTile<kTileColumns>::bytes(kRows), others, first, end, thread BU_FROM_SITE);
  }
}

// Copies a head's keys and values to shared memory in tiles of kTileKeys, for a block of kWarps
// warps. The next tile, or with more stages one after it, is copied while the current one is used.
// The kernel waits and synchronises in between,
//
//   keys.start(first);
//   for (int tile = first; tile < keys.tiles(); ++tile) {
//     copy_async_wait<0>();
//     sync_block();  // the tile is there for all, and all are done with the one before it
//     keys.start(tile + 1);
//
// so that the barrier of each kernel has its own line, which tests can take out. With more tiles
// more are on their way; with one more of values than of keys, these stay for one tile longer.
// A tile's columns lie in one SharedTile, or in several of kTileColumns side by side.
template <class T, int kHeadDim, int kWarps, int kKeyTiles = 2, int kValueTiles = kKeyTiles,
          int kTileKeys = 64, int kTileColumns = kHeadDim>
class KeyTiles {
  static constexpr uint32_t kTile = SharedTile<kHeadDim>::bytes(kTileKeys);
  const cuda::AttentionCudaParams& a_;
  const AttentionBlock& block_;
  const int end_;

 public:
  static constexpr int kKeys = kTileKeys;
  static constexpr uint32_t kSharedBytes = (kKeyTiles + kValueTiles) * kTile;

  // `end`: after the last key that is needed.
  BU_DEVICE KeyTiles(const cuda::AttentionCudaParams& a, const AttentionBlock& block, int end)
      : a_(a), block_(block), end_(end) {}

  BU_DEVICE int tiles() const { return (end_ + kKeys - 1) / kKeys; }

  // Starts copying a tile; nothing beyond the last one.
  BU_DEVICE void start(int tile) const {
    if (tile < tiles()) {
      // Computed again for each tile: there are no registers to keep pointers in.
      const uint32_t begin = keep_in_register(block_.k_begin);
      const uint32_t thread = keep_in_register(threadIdx.x);
      const HeadRows<const T> k(a_.k, begin, block_.kv_head), v(a_.v, begin, block_.kv_head);
      copy_tiles<kKeys, 32 * kWarps, kHeadDim, kTileColumns>(keys(tile), k, tile * kKeys, end_,
                                                             thread);
      copy_tiles<kKeys, 32 * kWarps, kHeadDim, kTileColumns>(values(tile), v, tile * kKeys, end_,
                                                             thread);
    }
    copy_async_commit();
  }

  // Where they lie in shared memory.
  static BU_DEVICE uint32_t keys(int tile) { return tile % kKeyTiles * kTile; }
  static BU_DEVICE uint32_t values(int tile) { return (kKeyTiles + tile % kValueTiles) * kTile; }
};

// One A operand from global memory: rows `first` .. `first` + 15, columns 16 * step .. + 15; rows
// from `end` on are zeros. `flip` is exclusive-ored: 0x80008000 negates.
template <class T>
BU_DEVICE void load_a(uint32_t (&a)[4], const HeadRows<const T>& rows, int first, int end, int step,
                      uint32_t flip) {
  const int lane = threadIdx.x % 32, row = first + lane / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int mine = row + i % 2 * 8, column = 16 * step + 2 * (lane % 4) + i / 2 * 8;
    a[i] = mine < end ? load_global<uint32_t>(rows.at(mine, column)) ^ flip : 0u;
  }
}

// All columns of the 16 rows.
template <int kColumns, class T>
BU_DEVICE void load_a(uint32_t (&a)[kColumns / 16][4], const HeadRows<const T>& rows, int first,
                      int end, uint32_t flip) {
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) load_a(a[step], rows, first, end, step, flip);
}

// Takes operands out of swizzled tiles in shared memory. `row` is a multiple of 16 and `step`
// counts 16 columns; the swizzle repeats every 8 rows, so what depends on the lane is worked out
// once.
template <int kColumns>
class Operands {
  using Tile = SharedTile<kColumns>;
  uint32_t lane_b_, lane_k_;

 public:
  BU_DEVICE Operands() {
    const int lane = threadIdx.x % 32;
    lane_b_ =
        keep_in_register(shared_base() + Tile::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2));
    lane_k_ = keep_in_register(shared_base() + Tile::offset(lane % 16, lane / 16));
  }

  // B of two neighbouring n8 tiles, b[0], b[1] and b[2], b[3], from a tile whose rows are the n
  // index: rows row .. row + 15, columns 16 * step .. 16 * step + 15 as k.
  BU_DEVICE void b(uint32_t (&b)[4], uint32_t tile, int row, int step BU_SITE) const {
    load_matrices(b, Tile::columns_on(tile + lane_b_, step) + Tile::bytes(row) BU_FROM_SITE);
  }

  // The same from a tile whose rows are the k index and whose columns are the n index.
  BU_DEVICE void b_transposed(uint32_t (&b)[4], uint32_t tile, int row, int step BU_SITE) const {
    load_matrices_transposed(
        b, Tile::columns_on(tile + lane_k_, step) + Tile::bytes(row) BU_FROM_SITE);
  }

  // A from a tile whose rows are the m index: rows row .. row + 15, columns 16 * step .. + 15 as k.
  BU_DEVICE void a(uint32_t (&a)[4], uint32_t tile, int row, int step BU_SITE) const {
    load_matrices(a, Tile::columns_on(tile + lane_k_, step) + Tile::bytes(row) BU_FROM_SITE);
  }

  // A from a tile whose rows are the k index and whose columns are the m index.
  BU_DEVICE void a_transposed(uint32_t (&a)[4], uint32_t tile, int row, int step BU_SITE) const {
    load_matrices_transposed(
        a, Tile::columns_on(tile + lane_b_, step) + Tile::bytes(row) BU_FROM_SITE);
  }
};

// Two neighbouring C tiles [16 x 8] as one A operand [16 x 16].
template <class T>
BU_DEVICE void pack_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack<T>(left[0], left[1]);
  a[1] = pack<T>(left[2], left[3]);
  a[2] = pack<T>(right[0], right[1]);
  a[3] = pack<T>(right[2], right[3]);
}

// Lane t of four neighbours gives w[0..3] and gets word t of each of the four.
BU_DEVICE void transpose_quad(uint32_t (&w)[4]) {
  const bool bit0 = threadIdx.x & 1, bit1 = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = shuffle_xor(bit0 ? w[i] : w[i + 1], 1);
    w[i] = bit0 ? got : w[i];
    w[i + 1] = bit0 ? w[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = shuffle_xor(bit1 ? w[i] : w[i + 2], 2);
    w[i] = bit1 ? got : w[i];
    w[i + 2] = bit1 ? w[i + 2] : got;
  }
}

// Writes C tiles [16 x 8 * kTiles] as rows `first` .. `first` + 15 (those before `end`), 16 bytes a
// store: row g times factor0, row g + 8 times factor1. All lanes take part.
template <class T, int kTiles>
BU_DEVICE void store_rows(const float (&c)[kTiles][4], float factor0, float factor1,
                          const HeadRows<T>& rows, int first, int end, int column) {
  static_assert(kTiles % 4 == 0);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + lane / 4 + 8 * half;
    const float factor = half ? factor1 : factor0;
#pragma unroll
    for (int n = 0; n < kTiles; n += 4) {
      Vector<uint32_t, 4> out;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        out.v[i] = pack<T>(c[n + i][2 * half] * factor, c[n + i][2 * half + 1] * factor);
      transpose_quad(out.v);
      if (row < end) store_global(rows.at(row, column + 8 * (n + lane % 4)), out);
    }
  }
}

// The gradient of a score, divided by what dropout multiplies by, as `delta` = rowsum(dout * out)
// is: then it takes two instructions. `dp`: the gradient of the weight; kMasked: of what dropout
// makes of it, `kept`, which is 0 where it is dropped.
template <bool kMasked>
BU_DEVICE float score_gradient(float weight, float kept, float dp, float delta) {
  return kMasked ? fma(kept, dp, -weight * delta) : weight * (dp - delta);
}

// rowsum(dout * out) of the rows g and g + 8 of 16, in all lanes that hold them; zero from `end`
// on.
template <int kHeadDim, class T>
BU_DEVICE void row_dots(float (&dots)[2], const uint32_t (&dout)[kHeadDim / 16][4],
                        const HeadRows<const T>& out, int first, int end) {
  uint32_t o[kHeadDim / 16][4];
  load_a<kHeadDim>(o, out, first, end, 0);
  dots[0] = dots[1] = 0.0f;
#pragma unroll
  for (int d = 0; d < kHeadDim / 16; ++d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const FloatPair a = unpack<T>(dout[d][i]), b = unpack<T>(o[d][i]);
      dots[i % 2] = fma(a.low, b.low, fma(a.high, b.high, dots[i % 2]));
    }
  }
  dots[0] = quad_sum(dots[0]);
  dots[1] = quad_sum(dots[1]);
}

}  // namespace bert_unpad
