// The functions of csrc/cuda/wgmma.h for the model of a block: the same names and meaning.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "gpu_model/block/convert.h"
#include "gpu_model/block/machine.h"

namespace bert_unpad {

inline void fence_shared(block_model::Site site = block_model::Site::current()) {
  if (block_model::sites.pass("fence_shared", site)) block_model::block.fence();
}

namespace block_model {

template <class F>
void group_operation(const char* name, const Site& site, const F& f) {
  char nothing = 0;
  block.group_collective(name, site, nothing, [&](char**) {
    ++statistics.collectives;
    f(block.products());
  });
}

}  // namespace block_model

inline void wgmma_fence(block_model::Site site = block_model::Site::current()) {
  if (!block_model::sites.pass("wgmma_fence", site)) return;
  block_model::group_operation("wgmma_fence", site, [](auto& products) { products.fenced = true; });
}

inline void wgmma_commit(block_model::Site site = block_model::Site::current()) {
  block_model::group_operation("wgmma_commit", site, [](auto& products) { products.commit(); });
}

template <int kPending>
void wgmma_wait(block_model::Site site = block_model::Site::current()) {
  if (!block_model::sites.pass("wgmma_wait", site)) return;
  block_model::group_operation("wgmma_wait", site, [](auto& products) { products.wait(kPending); });
}

// Every use of sums comes after a hold: here their wait is missed.
template <class U, int kTiles>
void wgmma_fence_operand(U (&registers)[kTiles][4],
                         block_model::Site site = block_model::Site::current()) {
  if constexpr (std::is_same_v<U, float>) {
    const unsigned lane = block_model::block.self->id % block_model::kGroupSize;
    if (block_model::block.products().holds(&registers[0][0], lane))
      block_model::block.fail(site, "sums of wgmma that was not waited for");
  }
}

template <int kColumns>
struct TileOperand {
  uint32_t low;

  static TileOperand at(uint32_t address) { return {(address & 0x3ffffu) >> 4 | 1u << 16}; }
  template <bool kTransposed>
  TileOperand step(int steps) const {
    return {low + static_cast<uint32_t>(steps) * (kTransposed ? 2 * kColumns : 2)};
  }
};

namespace block_model {

// `rows` rows (m or n) of 16 (k) from a tile, permuted by wgmma's 128-byte or 64-byte swizzle: bits
// 4 - 6 (4 - 5) of the address are exclusive-ored with bits 7 - 9 (7 - 8).
template <class T, int kColumns>
void load_operand(ProductOperand& operand, const Site& site) {
  const uint32_t start = (operand.tile & 0x3fffu) << 4, mask = kColumns / 8 - 1;
  const int tile_rows = operand.transposed ? kProductDepth : operand.count;
  const int pieces = (operand.transposed ? operand.count : kProductDepth) / 8;
  for (int row = 0; row < tile_rows; ++row) {
    for (int piece = 0; piece < pieces; ++piece) {
      const uint32_t at = start + static_cast<uint32_t>(row * 2 * kColumns + piece * 16);
      uint16_t bits[8];
      std::memcpy(bits, shared_memory.load_async(at ^ (at >> 7 & mask) << 4, site), sizeof(bits));
      for (int i = 0; i < 8; ++i) {
        const int column = 8 * piece + i;
        (operand.transposed ? operand.rows[column][row] : operand.rows[row][column]) =
            decode(T{bits[i]});
      }
    }
  }
}

struct ProductLane {
  float* d;
  const uint32_t* a;  // null: from a tile
  uint32_t a_tile, b_tile;
  bool add;
};

// Sums are made as mma makes them: rounded one by one, in the order of k.
template <class T, int kTiles>
void wgmma(ProductLane mine, bool transposed_a, bool transposed_b, const Site& site) {
  block.group_collective("wgmma", site, mine, [&](ProductLane** lanes) {
    ++statistics.collectives;
    statistics.mma += 4 * kTiles;
    PendingProducts& products = block.products();
    if (!products.fenced)
      block.fail(site, "wgmma, but no wgmma_fence since the last wgmma_commit or wgmma_wait");
    auto product = std::make_unique<Product>();
    product->add = mine.add;
    product->site = site;
    product->a = {mine.a == nullptr ? load_operand<T, 64> : nullptr,
                  kProductRows,
                  transposed_a,
                  mine.a_tile,
                  {}};
    product->b = {load_operand<T, 8 * kTiles>, 8 * kTiles, transposed_b, mine.b_tile, {}};
    std::vector<float*> sums(kGroupSize);
    for (unsigned l = 0; l < kGroupSize; ++l) {
      const ProductLane& lane = *lanes[l];
      if (lane.a_tile != mine.a_tile || lane.b_tile != mine.b_tile || lane.add != mine.add)
        block.fail(site, "wgmma, but the threads of the warpgroup give different operands");
      sums[l] = lane.d;
      const unsigned row = l / kWarpSize * 16 + l % kWarpSize / 4, column = 2 * (l % 4);
      for (unsigned i = 0; i < 4 && lane.a != nullptr; ++i) {
        const FloatPair pair = unpack<T>(lane.a[i]);
        float* const to = &product->a.rows[row + 8 * (i % 2)][column + 8 * (i / 2)];
        to[0] = pair.low;
        to[1] = pair.high;
      }
    }
    products.start(std::move(product), std::move(sums), (block.random.next() & 1) != 0);
  });
}

}  // namespace block_model

template <class T, bool kTransposedB>
void wgmma(float (&d)[8][4], const uint32_t (&a)[4], TileOperand<64> b, bool add,
           block_model::Site site = block_model::Site::current()) {
  block_model::wgmma<T, 8>({&d[0][0], a, 0, b.low, add}, false, kTransposedB, site);
}

template <class T, bool kTransposedA, bool kTransposedB, int kTiles>
void wgmma(float (&d)[kTiles][4], TileOperand<64> a, TileOperand<8 * kTiles> b, bool add,
           block_model::Site site = block_model::Site::current()) {
  static_assert(kTiles == 8 || (kTiles == 4 && kTransposedB));
  block_model::wgmma<T, kTiles>({&d[0][0], nullptr, a.low, b.low, add}, kTransposedA, kTransposedB,
                                site);
}

}  // namespace bert_unpad
