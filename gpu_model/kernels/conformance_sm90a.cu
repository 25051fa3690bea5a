// The conformance kernel of wgmma; see conformance.cu.
#include "conformance.h"
#include "cuda/launch.h"
#include "cuda/primitives.h"
#include "cuda/swizzle.h"

namespace bert_unpad::conformance {
namespace {

struct WgmmaParams {
  const void *a, *b;  // a [64, 64] with rows m, b [64, 64] with rows n, both with columns k;
                      // transposed, a has rows k, b [64, columns] too
  const float* c;     // [64, columns]; null: not added
  float* out;
};

template <int kColumns>
BU_DEVICE void copy_matrix(uint32_t to, const void* from) {
  using Tile = SharedTile<kColumns>;
  for (int i = static_cast<int>(threadIdx.x); i < 64 * Tile::kPieces; i += 128)
    copy_async_16(to + Tile::offset(i / Tile::kPieces, i % Tile::kPieces),
                  static_cast<const uint16_t*>(from) + 8 * i, true);
}

template <class T, bool kShared, bool kTransposedA, bool kTransposedB, int kColumns>
BU_KERNEL(128, 1)
wgmma_kernel(BU_PARAMS WgmmaParams p) {
  constexpr uint32_t a_tile = SharedTile<64>::bytes(64), b_tile = 0;
  copy_matrix<64>(a_tile, p.a);
  copy_matrix<kColumns>(b_tile, p.b);
  copy_async_commit();

  // Of element 0 of a C tile, or of register 0 of an A operand.
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 32 * 16 + thread % 32 / 4, column = 2 * (thread % 4);
  uint32_t a[4][4];
  for (int i = 0; i < 16 && !kShared; ++i)
    a[i / 4][i % 4] =
        load_global<uint32_t>(static_cast<const uint16_t*>(p.a) + 64 * (row + 8 * (i % 2)) +
                              column + 16 * (i / 4) + 8 * (i / 2 % 2));
  const auto index = [&](int i) {
    return kColumns * (row + i / 2 % 2 * 8) + i / 4 * 8 + column + i % 2;
  };
  float d[kColumns / 8][4];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i)
    d[i / 4][i % 4] = p.c == nullptr ? 0.0f : load_global<float>(p.c + index(i));

  copy_async_wait<0>();
  fence_shared();
  sync_block();
  const auto a_operand = TileOperand<64>::at(shared_base() + a_tile);
  const auto b_operand = TileOperand<kColumns>::at(shared_base() + b_tile);
  wgmma_fence_operand(d);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const auto b = b_operand.template step<kTransposedB>(step);
    const bool add = step > 0 || p.c != nullptr;
    if constexpr (kShared)
      wgmma<T, kTransposedA, kTransposedB>(d, a_operand.step<kTransposedA>(step), b, add);
    else
      wgmma<T, kTransposedB>(d, a[step], b, add);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_fence_operand(d);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) store_global(p.out + index(i), d[i / 4][i % 4]);
}

// A kernel for each form of the instruction, by its place here.
template <class T>
constexpr void (*kForms[])(const WgmmaParams) = {
    wgmma_kernel<T, false, false, false, 64>, wgmma_kernel<T, false, false, true, 64>,
    wgmma_kernel<T, true, false, false, 64>,  wgmma_kernel<T, true, false, true, 64>,
    wgmma_kernel<T, true, true, false, 64>,   wgmma_kernel<T, true, true, true, 64>,
    wgmma_kernel<T, true, false, true, 32>,   wgmma_kernel<T, true, true, true, 32>,
};

}  // namespace

BU_EXPORT int conformance_wgmma(int64_t dtype, int64_t form, const void* a, const void* b,
                                const float* c, float* out) {
  return guarded([&] {
    dispatch16(dtype, [&]<class T>() {
      cuda::launch("wgmma", kForms<T>[form], dim3(1), dim3(128), 2 * SharedTile<64>::bytes(64),
                   nullptr, WgmmaParams{a, b, c, out});
    });
  });
}

}  // namespace bert_unpad::conformance
