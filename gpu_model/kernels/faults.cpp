// Kernels with one fault each, and legal ones that differ by a line, to test that the model of a
// block reports the fault and nothing else. Where an error has to point to is marked with `fault:
// name`.
#include "gpu_model/block/c_api.h"
//
#include <cstring>

#include "cuda/launch.h"

namespace bert_unpad::faults {
namespace {

struct alignas(16) Quad {
  float v[4];
};

// 64 threads; `in` and `out` have 64 floats, `in` is read-only.
struct Params {
  const float* in;
  float* out;
  int rounds;
};

using Kernel = void (*)(Params);
constexpr unsigned kThreads = 64, kSharedBytes = 4096;

uint32_t lane_id() { return threadIdx.x % 32; }
uint32_t slot(uint32_t thread) { return 4 * thread; }

void half_syncs(const Params) {
  if (threadIdx.x < 32) sync_block();  // fault: half_syncs
}

void two_barriers(const Params) {
  if (threadIdx.x < 32)
    sync_block();  // fault: two_barriers
  else
    sync_block();  // fault: two_barriers
}

void exits_before_barrier(const Params) {
  if (threadIdx.x == 40) return;
  sync_block();  // fault: exits_before_barrier
}

void skips_shuffle(const Params p) {
  float x = load_global<float>(p.in + threadIdx.x);
  if (lane_id() != 7) x = shuffle_xor(x, 1);  // fault: skips_shuffle
  sync_block();                               // fault: skips_shuffle
  store_global(p.out + threadIdx.x, x);
}

void two_shuffles(const Params p) {
  float x = load_global<float>(p.in + threadIdx.x);
  if (lane_id() < 16)
    x = shuffle_xor(x, 1);  // fault: two_shuffles
  else
    x = shuffle_xor(x, 2);  // fault: two_shuffles
  store_global(p.out + threadIdx.x, x);
}

void shared_out_of_bounds(const Params) {
  store_shared(kSharedBytes - 128 + 4 * threadIdx.x, 1.0f);  // fault: shared_out_of_bounds
}

void shared_misaligned(const Params) {
  store_shared(16 * threadIdx.x + 4, Quad{});  // fault: shared_misaligned
}

void matrices_misaligned(const Params) {
  store_shared(slot(threadIdx.x), 1.0f);
  sync_block();
  uint32_t r[4];
  load_matrices(r, shared_base() + (lane_id() == 9 ? 8 : 0));  // fault: matrices_misaligned
}

void matrices_without_base(const Params) {
  store_shared(slot(threadIdx.x), 1.0f);
  sync_block();
  uint32_t r[4];
  load_matrices(r, 0);  // fault: matrices_without_base
}

void global_out_of_bounds(const Params p) {
  load_global<float>(p.in + threadIdx.x + 1);  // fault: global_out_of_bounds
}

void global_before_the_buffer(const Params p) {
  store_global(p.out + threadIdx.x - 1, 1.0f);  // fault: global_before_the_buffer
}

void global_partly_outside(const Params p) {
  load_global<Quad>(p.in + 2 + 4 * (threadIdx.x % 16));  // fault: global_partly_outside
}

void global_misaligned(const Params p) {
  load_global<Quad>(p.in + threadIdx.x % 4);  // fault: global_misaligned
}

void writes_read_only(const Params p) {
  store_global(const_cast<float*>(p.in) + threadIdx.x, 1.0f);  // fault: writes_read_only
}

void copy_out_of_bounds(const Params p) {
  const uint32_t i = threadIdx.x;
  copy_async_16(16 * i, p.in + 4 * i, true);  // fault: copy_out_of_bounds
  copy_async_commit();
  copy_async_wait<0>();
}

void copy_misaligned(const Params p) {
  const uint32_t i = threadIdx.x;
  copy_async_16(16 * i, p.in + i % 32, true);  // fault: copy_misaligned
  copy_async_commit();
  copy_async_wait<0>();
}

// Legal: nothing is read where there is nothing valid.
void copy_of_nothing(const Params p) {
  const uint32_t i = threadIdx.x;
  copy_async_16(16 * i, p.in + 4 * i, i < 16);
  copy_async_commit();
  copy_async_wait<0>();
  store_global(p.out + i, load_shared<float>(16 * i));
}

void copy_never_waited_for(const Params p) {
  copy_async_4(slot(threadIdx.x), p.in + threadIdx.x, true);  // fault: copy_never_waited_for
  copy_async_commit();
}

void copy_not_committed(const Params p) {
  copy_async_4(slot(threadIdx.x), p.in + threadIdx.x, true);  // fault: copy_not_committed
  copy_async_wait<0>();
}

void copy_read_early(const Params p) {
  copy_async_4(slot(threadIdx.x), p.in + threadIdx.x, true);
  copy_async_commit();
  store_global(p.out + threadIdx.x,
               load_shared<float>(slot(threadIdx.x)));  // fault: copy_read_early
  copy_async_wait<0>();
}

void copy_in_younger_group(const Params p) {
  copy_async_4(slot(threadIdx.x), p.in + threadIdx.x, true);
  copy_async_commit();
  copy_async_wait<1>();
  const float x = load_shared<float>(slot(threadIdx.x));  // fault: copy_in_younger_group
  store_global(p.out + threadIdx.x, x);
  copy_async_wait<0>();
}

// The shuffles let the lanes' copies land, or the lanes read, before the next line runs.
void copy_without_barrier(const Params p) {
  copy_async_4(slot(threadIdx.x), p.in + threadIdx.x, true);
  copy_async_commit();
  copy_async_wait<0>();
  shuffle_xor(1.0f, 1);
  const float x = load_shared<float>(slot(threadIdx.x ^ 1));  // fault: copy_without_barrier
  store_global(p.out + threadIdx.x, x);
}

void copy_over_unread_data(const Params p) {
  store_shared(slot(threadIdx.x), 1.0f);
  sync_block();
  const float x = load_shared<float>(slot(threadIdx.x ^ 1));
  shuffle_xor(1.0f, 1);
  copy_async_4(slot(threadIdx.x), p.in + threadIdx.x, true);  // fault: copy_over_unread_data
  copy_async_commit();
  copy_async_wait<0>();
  store_global(p.out + threadIdx.x, x);
}

// A shuffle keeps lanes together, but orders no memory accesses.
void shuffle_for_barrier(const Params p) {
  store_shared(slot(threadIdx.x), load_global<float>(p.in + threadIdx.x));
  shuffle_xor(1.0f, 1);
  const float x = load_shared<float>(slot(threadIdx.x ^ 1));  // fault: shuffle_for_barrier
  store_global(p.out + threadIdx.x, x);
}

// Legal.
void warp_barrier(const Params p) {
  store_shared(slot(threadIdx.x), load_global<float>(p.in + threadIdx.x));
  sync_warp();
  const float x = load_shared<float>(slot(threadIdx.x ^ 1));
  store_global(p.out + threadIdx.x, x);
}

void warp_barrier_for_another_warp(const Params p) {
  store_shared(slot(threadIdx.x), load_global<float>(p.in + threadIdx.x));
  sync_warp();
  if (threadIdx.x >= 32) sync_warp();
  const float x =
      load_shared<float>(slot(threadIdx.x ^ 32));  // fault: warp_barrier_for_another_warp
  store_global(p.out + threadIdx.x, x);
}

void matrices_after_shuffle(const Params p) {
  const uint32_t at = 16 * lane_id() + 512 * (threadIdx.x / 32);
  store_shared(at, Quad{});
  shuffle_xor(1.0f, 1);
  uint32_t r[4];
  load_matrices(r, shared_base() + at);  // fault: matrices_after_shuffle
  store_global(p.out + threadIdx.x, static_cast<float>(r[0]));
}

// Legal: each warp writes, reads as matrices, and writes again, after its own barriers.
void matrices_after_barriers(const Params p) {
  const uint32_t at = 16 * lane_id() + 512 * (threadIdx.x / 32);
  uint32_t r[4] = {};
  for (int round = 0; round < 2; ++round) {
    store_shared(at, Quad{});
    sync_warp();
    load_matrices(r, shared_base() + at);
    sync_warp();
  }
  store_global(p.out + threadIdx.x, static_cast<float>(r[0]));
}

void write_under_matrices(const Params) {
  const uint32_t at = 16 * lane_id() + 512 * (threadIdx.x / 32);
  store_shared(at, Quad{});
  sync_warp();
  uint32_t r[4];
  load_matrices(r, shared_base() + at);
  store_shared(at, Quad{});  // fault: write_under_matrices
}

// The first read is forgotten by neither the second one nor the warp's barrier.
void write_after_reads(const Params p) {
  if (threadIdx.x == 0) store_shared(0, 1.0f);
  sync_block();
  float x = load_shared<float>(0);  // fault: write_after_reads
  sync_warp();
  if (threadIdx.x >= 32) x += load_shared<float>(0);  // fault: write_after_reads
  sync_warp();
  if (threadIdx.x == 1) store_shared(0, 2.0f);  // fault: write_after_reads
  store_global(p.out + threadIdx.x, x);
}

// Two readers of the writer's warp, before its barrier, must not hide one of the other warp. The
// shuffles let the warps overtake each other.
void write_under_other_warp(const Params p) {
  const bool first = threadIdx.x < 32;
  if (threadIdx.x == 0) store_shared(0, 1.0f);
  sync_block();
  if (threadIdx.x < 2) load_shared<float>(0);
  for (int i = 0; i < (first ? 20 : 10); ++i) shuffle_xor(1.0f, 1);
  if (threadIdx.x == 32) load_shared<float>(0);  // fault: write_under_other_warp
  sync_warp();
  if (threadIdx.x == 0) store_shared(0, 2.0f);  // fault: write_under_other_warp
  store_global(p.out + threadIdx.x, 1.0f);
}

void two_writers(const Params) {
  store_shared(slot(threadIdx.x / 2), 1.0f);  // fault: two_writers
}

void uninitialised(const Params p) {
  if (threadIdx.x != 5) store_shared(slot(threadIdx.x), 1.0f);
  sync_block();
  const float x = load_shared<float>(slot(threadIdx.x ^ 1));  // fault: uninitialised
  store_global(p.out + threadIdx.x, x);
}

void requirement(const Params p) {
  const float x = load_global<float>(p.in + threadIdx.x);
  BU_REQUIRE(x > 1000.0f, "in must be above 1000");  // fault: requirement
}

// `rounds` sums over the block of in + round, each in all threads; right as it is, wrong without
// either barrier.
void row_sum(const Params p) {
  float total = 0.0f;
  for (int round = 0; round < p.rounds; ++round) {
    const float x = load_global<float>(p.in + threadIdx.x) + static_cast<float>(round);
    store_shared(slot(threadIdx.x), x);
    sync_block();
    float sum = 0.0f;
    for (uint32_t i = 0; i < blockDim.x; ++i) sum += load_shared<float>(slot(i));
    total += sum;
    sync_block();
  }
  store_global(p.out + threadIdx.x, total);
}

// Legal only as far as a GPU may do it either way: the copy reads a 1 or a 2.
void copy_of_changing_source(const Params p) {
  float* source = p.out + threadIdx.x;
  store_global(source, 1.0f);
  copy_async_4(slot(threadIdx.x), source, true);
  copy_async_commit();
  store_global(source, 2.0f);
  copy_async_wait<0>();
  store_global(source, load_shared<float>(slot(threadIdx.x)));
}

// What remains is the number of the block that ran last.
void last_block(const Params p) {
  store_global(p.out + threadIdx.x, static_cast<float>(blockIdx.x));
}

// For timing.
void shuffles(const Params p) {
  float x = load_global<float>(p.in + threadIdx.x % 64);
  for (int round = 0; round < p.rounds; ++round) x = shuffle_xor(x, 1 + round % 31);
  if (threadIdx.x < 64) store_global(p.out + threadIdx.x, x);
}

// Random accesses to one word. In each step: the threads' accesses, then what their warp does.
enum Access : uint8_t { kNothing, kRead, kWrite };
enum WarpStep : uint8_t { kGoOn, kSyncWarp, kSyncBlock, kLoadMatrices };

struct Program {
  const uint8_t* accesses;    // [steps, kThreads]
  const uint8_t* warp_steps;  // [steps, kThreads / 32]
  int64_t steps;
};

void run_steps(const Program p) {
  if (threadIdx.x < 4) store_shared(slot(threadIdx.x), 1.0f);
  sync_block();
  for (int64_t step = 0; step < p.steps; ++step) {
    const uint8_t access = p.accesses[step * kThreads + threadIdx.x];
    if (access == kRead) load_shared<float>(0);
    if (access == kWrite) store_shared(0, 1.0f);
    const uint8_t warp_step = p.warp_steps[step * (kThreads / 32) + threadIdx.x / 32];
    uint32_t r[4];
    if (warp_step == kLoadMatrices) load_matrices(r, shared_base());
    if (warp_step == kSyncWarp) sync_warp();
    if (warp_step == kSyncBlock) sync_block();
  }
}

struct Case {
  const char* name;
  Kernel kernel;
};

#define BU_CASE(name) {#name, name}
// clang-format off
constexpr Case kCases[] = {
    BU_CASE(half_syncs), BU_CASE(two_barriers), BU_CASE(exits_before_barrier),
    BU_CASE(skips_shuffle), BU_CASE(two_shuffles), BU_CASE(shared_out_of_bounds),
    BU_CASE(shared_misaligned), BU_CASE(matrices_misaligned), BU_CASE(matrices_without_base),
    BU_CASE(global_out_of_bounds), BU_CASE(global_before_the_buffer),
    BU_CASE(global_partly_outside), BU_CASE(global_misaligned), BU_CASE(writes_read_only),
    BU_CASE(copy_out_of_bounds), BU_CASE(copy_misaligned), BU_CASE(copy_of_nothing),
    BU_CASE(copy_never_waited_for), BU_CASE(copy_not_committed), BU_CASE(copy_read_early),
    BU_CASE(copy_in_younger_group), BU_CASE(copy_without_barrier), BU_CASE(copy_over_unread_data),
    BU_CASE(shuffle_for_barrier), BU_CASE(warp_barrier), BU_CASE(warp_barrier_for_another_warp),
    BU_CASE(matrices_after_shuffle), BU_CASE(matrices_after_barriers),
    BU_CASE(write_under_matrices), BU_CASE(write_after_reads), BU_CASE(write_under_other_warp),
    BU_CASE(two_writers), BU_CASE(uninitialised), BU_CASE(requirement), BU_CASE(row_sum),
    BU_CASE(copy_of_changing_source), BU_CASE(last_block), BU_CASE(shuffles),
};
// clang-format on
#undef BU_CASE

}  // namespace

BU_EXPORT int run_case(const char* name, int64_t blocks, int64_t threads, int64_t shared_bytes,
                       int64_t rounds, const float* in, float* out) {
  return block_model::guarded([&] {
    for (const Case& c : kCases) {
      if (std::strcmp(c.name, name) != 0) continue;
      const dim3 grid(static_cast<unsigned>(blocks)), shape(static_cast<unsigned>(threads));
      return cuda::launch(name, c.kernel, grid, shape, static_cast<size_t>(shared_bytes), nullptr,
                          Params{in, out, static_cast<int>(rounds)});
    }
    throw std::invalid_argument(std::string("no case ") + name);
  });
}

BU_EXPORT int run_program(const uint8_t* accesses, const uint8_t* warp_steps, int64_t steps) {
  return block_model::guarded([&] {
    cuda::launch("program", run_steps, dim3(1), dim3(kThreads), 16, nullptr,
                 Program{accesses, warp_steps, steps});
  });
}

}  // namespace bert_unpad::faults
