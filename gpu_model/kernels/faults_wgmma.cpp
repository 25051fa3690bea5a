// A product of a warpgroup, right or with one fault, to test that the model of a block reports the
// fault and nothing else.
#include "gpu_model/block/c_api.h"
//
#include "cuda/launch.h"
#include "cuda/swizzle.h"

namespace bert_unpad::faults {
namespace {

enum class Fault {
  kNone,
  kTilesDiffer,
  kWarpsExit,
  kWarpsAtBarrier,
  kEarlyFence,
  kLateFence,
  kNotCommitted,
  kYoungerGroup,
  kOverwritten,
  kCopiedOver,
};

struct Params {
  const uint16_t* in;  // [64, 64] bf16, read-only
  float* out;          // [64, 64]: the product of the matrix with its transpose
  Fault fault;
};

void product(const Params p) {
  using Tile = SharedTile<64>;
  const auto thread = static_cast<int>(threadIdx.x);
  const auto copy = [&] {
    for (int i = thread; i < 64 * Tile::kPieces; i += static_cast<int>(blockDim.x))
      copy_async_16(Tile::offset(i / Tile::kPieces, i % Tile::kPieces), p.in + 8 * i, true);
    copy_async_commit();
  };
  copy();
  if (p.fault == Fault::kEarlyFence) fence_shared();
  copy_async_wait<0>();
  if (p.fault != Fault::kEarlyFence && p.fault != Fault::kLateFence) fence_shared();
  sync_block();
  if (p.fault == Fault::kLateFence) fence_shared();
  if (p.fault == Fault::kWarpsExit && thread >= 64) return;
  if (p.fault == Fault::kWarpsAtBarrier && thread >= 64) sync_block();
  auto tile = TileOperand<64>::at(shared_base());
  if (p.fault == Fault::kTilesDiffer && thread == 70) tile.low += 64;
  float d[8][4];
  wgmma_fence();
  for (int step = 0; step < 4; ++step) {
    const TileOperand<64> operand = tile.step<false>(step);
    wgmma<bf16, false, false>(d, operand, operand, step > 0);
    if (p.fault == Fault::kYoungerGroup && step == 2) {
      wgmma_commit();
      wgmma_fence();
    }
  }
  if (p.fault != Fault::kNotCommitted) wgmma_commit();
  if (p.fault == Fault::kOverwritten) store_shared(4 * threadIdx.x, 0.0f);
  if (p.fault == Fault::kCopiedOver) {
    sync_block();
    copy();
    copy_async_wait<0>();
  }
  if (p.fault == Fault::kYoungerGroup)
    wgmma_wait<1>();
  else
    wgmma_wait<0>();
  if (p.fault == Fault::kWarpsAtBarrier && thread < 64) sync_block();
  const int row = thread / 32 * 16 + thread % 32 / 4, column = 2 * (thread % 4);
  for (int i = 0; i < 32; ++i)
    store_global(p.out + 64 * (row + i / 2 % 2 * 8) + i / 4 * 8 + column + i % 2, d[i / 4][i % 4]);
}

}  // namespace

BU_EXPORT int run_product(int64_t fault, int64_t threads, const uint16_t* in, float* out) {
  return block_model::guarded([&] {
    cuda::launch("product", product, dim3(1), dim3(static_cast<unsigned>(threads)),
                 SharedTile<64>::bytes(64), nullptr, Params{in, out, static_cast<Fault>(fault)});
  });
}

}  // namespace bert_unpad::faults
