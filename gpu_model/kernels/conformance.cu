// One kernel per primitive, or a few that belong together, which writes what it got to global
// memory: conformance.py compares that with the primitive's definition. Compiled by a plain C++
// compiler it tests the model of a block, compiled by nvcc the GPU, so that what kernels do on the
// one is known to hold on the other.
#include "conformance.h"

#include "cuda/dropout_pairs.h"
#include "cuda/launch.h"
#include "cuda/primitives.h"
#include "cuda/swizzle.h"

namespace bert_unpad::conformance {
namespace {

struct Lane {
  int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
};

// Fragment of a row-major [16, 16] matrix.
BU_DEVICE void load_a(uint32_t (&a)[4], const void* matrix) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = lane.g + 8 * (i % 2), column = 2 * lane.t + 8 * (i / 2);
    a[i] = load_global<uint32_t>(static_cast<const uint16_t*>(matrix) + 16 * row + column);
  }
}

// Position of c[i] in a row-major [16, width] matrix.
BU_DEVICE int c_index(int i, int width) {
  const Lane lane;
  return (lane.g + 8 * (i / 2)) * width + 2 * lane.t + i % 2;
}

struct MmaParams {
  const void *a, *b;  // [16, 16] and [8, 16]: of B's columns the rows
  const float* c;     // [16, 8]
  float* out;
};

template <class T>
BU_KERNEL(32, 1)
mma_kernel(BU_PARAMS MmaParams p) {
  const Lane lane;
  uint32_t a[4];
  load_a(a, p.a);
  const uint16_t* b = static_cast<const uint16_t*>(p.b) + 16 * lane.g + 2 * lane.t;
  const uint32_t b0 = load_global<uint32_t>(b), b1 = load_global<uint32_t>(b + 8);
  float c[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] = load_global<float>(p.c + c_index(i, 8));
  mma<T>(c, a, b0, b1);
#pragma unroll
  for (int i = 0; i < 4; ++i) store_global(p.out + c_index(i, 8), c[i]);
}

struct MatrixParams {
  const uint32_t* rows;          // [32, 4]: 8 elements of 16 bits each
  const int32_t* address;        // [32]: which row each lane points at
  uint32_t *plain, *transposed;  // [32, 4]
};

BU_KERNEL(32, 1) matrices_kernel(BU_PARAMS MatrixParams p) {
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 4; ++i) {
    const int word = 4 * lane + i;
    store_shared(4 * static_cast<uint32_t>(word), load_global<uint32_t>(p.rows + word));
  }
  sync_warp();
  const int32_t row = load_global<int32_t>(p.address + lane);
  const uint32_t address = shared_base() + 16 * static_cast<uint32_t>(row);
  uint32_t r[4];
  load_matrices(r, address);
  for (int i = 0; i < 4; ++i) store_global(p.plain + 4 * lane + i, r[i]);
  load_matrices_transposed(r, address);
  for (int i = 0; i < 4; ++i) store_global(p.transposed + 4 * lane + i, r[i]);
}

struct ShuffleParams {
  const float* x;     // [32]
  float* floats;      // [32 masks, 32]
  uint32_t* numbers;  // [32 masks, 32]: of the lane's number times 0x01010101
  uint32_t* first;    // [32]: the first lane's of 7 more than that
};

BU_KERNEL(32, 1) shuffle_kernel(BU_PARAMS ShuffleParams p) {
  const uint32_t lane = threadIdx.x;
  const float x = load_global<float>(p.x + lane);
  for (int mask = 0; mask < 32; ++mask) {
    store_global(p.floats + 32 * mask + lane, shuffle_xor(x, mask));
    store_global(p.numbers + 32 * mask + lane, shuffle_xor(lane * 0x01010101u, mask));
  }
  store_global(p.first + lane, first_lane(lane * 0x01010101u + 7));
}

struct BallotParams {
  const uint32_t* votes;  // [rounds]: bit l is lane l's
  uint32_t* words;        // [rounds, 32]: what each lane gets
  int64_t rounds;
};

BU_KERNEL(32, 1) ballot_kernel(BU_PARAMS BallotParams p) {
  const uint32_t lane = threadIdx.x;
  for (int64_t i = 0; i < p.rounds; ++i) {
    const uint32_t votes = load_global<uint32_t>(p.votes + i);
    store_global(p.words + 32 * i + lane, ballot((votes >> lane & 1) != 0));
  }
}

struct DecisionParams {
  const uint32_t* pairs;  // [n]
  uint32_t* masks;        // [n]: of what is kept
  float* values;          // [2 n]: 1 and 2, where dropped 0
  uint32_t threshold;
};

BU_KERNEL(128, 1) decisions_kernel(BU_PARAMS DecisionParams p) {
  const PairRule rule(p.threshold);
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t pair = load_global<uint32_t>(p.pairs + i);
  float low = 1.0f, high = 2.0f;
  rule.apply(low, high, pair);
  store_global(p.masks + i, rule.kept(pair));
  store_global(p.values + 2 * i, low);
  store_global(p.values + 2 * i + 1, high);
}

struct PackParams {
  const float* x;         // [2 n]
  const uint32_t* pairs;  // [n]
  uint32_t* packed;       // [n]
  float* unpacked;        // [2 n]
};

template <class T>
BU_KERNEL(128, 1)
pack_kernel(BU_PARAMS PackParams p) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const float low = load_global<float>(p.x + 2 * i), high = load_global<float>(p.x + 2 * i + 1);
  store_global(p.packed + i, pack<T>(low, high));
  const FloatPair pair = unpack<T>(load_global<uint32_t>(p.pairs + i));
  store_global(p.unpacked + 2 * i, pair.low);
  store_global(p.unpacked + 2 * i + 1, pair.high);
}

struct alignas(16) Quad {
  uint32_t w[4];
};

struct CopyParams {
  const uint32_t* source;   // [64, 4]
  const int32_t* valid;     // [64]
  uint32_t *quads, *words;  // [64, 4], [64]: from the neighbour's copies
};

// Two groups of copies in flight; each thread then reads what its neighbour copied.
BU_KERNEL(64, 1) copy_kernel(BU_PARAMS CopyParams p) {
  const uint32_t i = threadIdx.x, neighbour = i ^ 1, words = 64 * 16;
  const bool valid = load_global<int32_t>(p.valid + i) != 0;
  copy_async_16(16 * i, p.source + 4 * i, valid);
  copy_async_commit();
  copy_async_4(words + 4 * i, p.source + 4 * i + 1, !valid);
  copy_async_commit();
  copy_async_wait<1>();
  sync_block();
  store_global(p.quads + 4 * i, load_shared<Quad>(16 * neighbour));
  copy_async_wait<0>();
  sync_block();
  store_global(p.words + i, load_shared<uint32_t>(words + 4 * neighbour));
}

struct TileParams {
  const void *q, *k, *v, *x;  // [16, 64], [16, 64], [16, 64], [16, 16]
  float *scores, *out;        // q k^T [16, 16], x v [16, 64]
};

using Tile = SharedTile<64>;
constexpr uint32_t kTileBytes = Tile::bytes(16);

// The two products of attention, with all operands but x through asynchronous copies, swizzled
// tiles and load_matrices.
template <class T>
BU_KERNEL(32, 1)
tile_kernel(BU_PARAMS TileParams p) {
  const int lane = static_cast<int>(threadIdx.x);
  constexpr uint32_t q = 0, k = kTileBytes, v = 2 * kTileBytes;
  for (int i = lane; i < 16 * Tile::kPieces; i += 32) {
    const uint32_t at = Tile::offset(i / Tile::kPieces, i % Tile::kPieces);
    copy_async_16(q + at, static_cast<const uint16_t*>(p.q) + 8 * i, true);
    copy_async_16(k + at, static_cast<const uint16_t*>(p.k) + 8 * i, true);
    copy_async_16(v + at, static_cast<const uint16_t*>(p.v) + 8 * i, true);
  }
  copy_async_commit();
  copy_async_wait<0>();
  sync_block();
  const uint32_t base = shared_base();
  float scores[2][4] = {};
  for (int step = 0; step < 4; ++step) {
    uint32_t a[4], b[4];
    load_matrices(a, base + q + Tile::offset(lane % 16, 2 * step + lane / 16));
    load_matrices(b, base + k + Tile::offset(lane % 8 + 8 * (lane / 16), 2 * step + lane / 8 % 2));
    mma<T>(scores[0], a, b[0], b[1]);
    mma<T>(scores[1], a, b[2], b[3]);
  }
  uint32_t x[4];
  load_a(x, p.x);
  float out[8][4] = {};
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    uint32_t b[4];
    load_matrices_transposed(b, base + v + Tile::offset(lane % 16, j + lane / 16));
    mma<T>(out[j], x, b[0], b[1]);
    mma<T>(out[j + 1], x, b[2], b[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    for (int n = 0; n < 2; ++n) store_global(p.scores + c_index(i, 16) + 8 * n, scores[n][i]);
    for (int j = 0; j < 8; ++j) store_global(p.out + c_index(i, 64) + 8 * j, out[j][i]);
  }
}

}  // namespace

BU_EXPORT int conformance_mma(int64_t dtype, const void* a, const void* b, const float* c,
                              float* out) {
  return guarded([&] {
    dispatch16(dtype, [&]<class T>() {
      cuda::launch("mma", mma_kernel<T>, dim3(1), dim3(32), 0, nullptr, MmaParams{a, b, c, out});
    });
  });
}

BU_EXPORT int conformance_matrices(const uint32_t* rows, const int32_t* address, uint32_t* plain,
                                   uint32_t* transposed) {
  return guarded([&] {
    cuda::launch("matrices", matrices_kernel, dim3(1), dim3(32), 512, nullptr,
                 MatrixParams{rows, address, plain, transposed});
  });
}

BU_EXPORT int conformance_shuffle(const float* x, float* floats, uint32_t* numbers,
                                  uint32_t* first) {
  return guarded([&] {
    cuda::launch("shuffle", shuffle_kernel, dim3(1), dim3(32), 0, nullptr,
                 ShuffleParams{x, floats, numbers, first});
  });
}

BU_EXPORT int conformance_ballot(int64_t rounds, const uint32_t* votes, uint32_t* words) {
  return guarded([&] {
    cuda::launch("ballot", ballot_kernel, dim3(1), dim3(32), 0, nullptr,
                 BallotParams{votes, words, rounds});
  });
}

// n is a multiple of 128.
BU_EXPORT int conformance_decisions(int64_t n, int64_t threshold, const uint32_t* pairs,
                                    uint32_t* masks, float* values) {
  return guarded([&] {
    cuda::launch("decisions", decisions_kernel, dim3(static_cast<unsigned>(n) / 128), dim3(128), 0,
                 nullptr, DecisionParams{pairs, masks, values, static_cast<uint32_t>(threshold)});
  });
}

// n is a multiple of 128.
BU_EXPORT int conformance_pack(int64_t dtype, int64_t n, const float* x, const uint32_t* pairs,
                               uint32_t* packed, float* unpacked) {
  return guarded([&] {
    dispatch16(dtype, [&]<class T>() {
      cuda::launch("pack", pack_kernel<T>, dim3(static_cast<unsigned>(n) / 128), dim3(128), 0,
                   nullptr, PackParams{x, pairs, packed, unpacked});
    });
  });
}

BU_EXPORT int conformance_copy(const uint32_t* source, const int32_t* valid, uint32_t* quads,
                               uint32_t* words) {
  return guarded([&] {
    cuda::launch("copy", copy_kernel, dim3(1), dim3(64), 64 * 20, nullptr,
                 CopyParams{source, valid, quads, words});
  });
}

BU_EXPORT int conformance_tile(int64_t dtype, const void* q, const void* k, const void* v,
                               const void* x, float* scores, float* out) {
  return guarded([&] {
    dispatch16(dtype, [&]<class T>() {
      cuda::launch("tile", tile_kernel<T>, dim3(1), dim3(32), 3 * kTileBytes, nullptr,
                   TileParams{q, k, v, x, scores, out});
    });
  });
}

}  // namespace bert_unpad::conformance
