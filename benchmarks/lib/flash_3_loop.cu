// Attention's forward pass in the way of FlashAttention-3 (arXiv:2407.08608, algorithm 2), with
// bulk copies where that has tensor maps: a warp copies tiles of keys and values, which lie in
// global memory as wgmma wants them in shared memory; warpgroups of 64 queries begin the next
// tile's scores and this tile's product with the values before they compute exponentials. Head
// dimension 64, tiles of 128 keys, base-2 exponentials of `scale` times the scores.
#include <cstdint>

extern __shared__ __align__(1024) char memory[];

#define DEVICE static __device__ __forceinline__

namespace {

constexpr int kStages = 2;
constexpr uint32_t kTile = 128 * 64 * 2, kQueryTile = 64 * 64 * 2, kQueries = 1024;
// mbarriers: of the queries, and of each stage of keys and values, when full and when empty.
constexpr uint32_t kFullKeys = 8, kFullValues = 24, kEmptyKeys = 40, kEmptyValues = 56;

DEVICE void init(uint32_t mbarrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(count) : "memory");
}
DEVICE void wait(uint32_t mbarrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(
          mbarrier),
      "r"(parity)
      : "memory");
}
DEVICE void arrive(uint32_t mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
DEVICE void copy(uint32_t to, const char* from, uint32_t bytes, uint32_t mbarrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(mbarrier)
      : "memory");
}

// 128-byte swizzle, 1,024 bytes from 8 lines to the next 8.
DEVICE uint64_t descriptor(uint32_t address) {
  return (address & 0x3ffffu) >> 4 | uint64_t{64} << 32 | uint64_t{1} << 62;
}
DEVICE void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
DEVICE void finish() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler moves nothing that uses these registers across this place.
template <int kCount>
DEVICE void hold(float (&x)[kCount]) {
  for (float& each : x) asm volatile("" : "+f"(each)::"memory");
}
DEVICE void hold(uint32_t (&x)[32]) {
  for (uint32_t& each : x) asm volatile("" : "+r"(each)::"memory");
}

#define FOUR(n) "%" #n "0, %" #n "1, %" #n "2, %" #n "3, "
#define TEN(n) FOUR(n) "%" #n "4, %" #n "5, %" #n "6, %" #n "7, %" #n "8, %" #n "9, "
#define FIRST_TEN "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
#define SUMS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS16(i) SUMS(i), SUMS(i + 4), SUMS(i + 8), SUMS(i + 12)

DEVICE void multiply(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" FIRST_TEN TEN(1) TEN(2) TEN(3)
          TEN(4) TEN(5) "%60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n}"
      : SUMS16(0), SUMS16(16), SUMS16(32), SUMS16(48)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
DEVICE void multiply(float (&d)[32], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_TEN TEN(1)
          TEN(2) "%30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
      : SUMS16(0), SUMS16(16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

DEVICE float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float quad(float x, float (*f)(float, float)) {
  x = f(x, __shfl_xor_sync(~0u, x, 1));
  return f(x, __shfl_xor_sync(~0u, x, 2));
}

struct Rows {  // of a thread: two
  float top[2] = {-1e30f, -1e30f}, sum[2] = {0.0f, 0.0f}, shrink[2];

  __device__ __forceinline__ void weigh(float (&s)[64], float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = top[half];
#pragma unroll
      for (int n = 0; n < 64; n += 4)
        most = fmaxf(most, fmaxf(s[n + 2 * half], s[n + 2 * half + 1]));
      most = quad(most, [](float x, float y) { return fmaxf(x, y); });
      shrink[half] = exponential((top[half] - most) * scale);
      top[half] = most;
      float total = 0.0f;
#pragma unroll
      for (int n = 0; n < 64; ++n) {
        if (n / 2 % 2 != half) continue;
        s[n] = exponential(fmaf(s[n], scale, -most * scale));
        total += s[n];
      }
      sum[half] = fmaf(sum[half], shrink[half], total);
    }
  }
};

DEVICE void pack(uint32_t (&weights)[32], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(weights[i]) : "f"(s[2 * i + 1]), "f"(s[2 * i]));
}

template <int kGroups>
DEVICE void attention(const char* q, const char* k, const char* v, float* out, int tiles,
                      float scale) {
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const uint32_t keys = base + kQueries + kGroups * kQueryTile, values = keys + kStages * kTile;
  if (threadIdx.x == 0) {
    init(base, 1);
    for (uint32_t stage = 0; stage < 8 * kStages; stage += 8) {
      init(base + kFullKeys + stage, 1);
      init(base + kFullValues + stage, 1);
      init(base + kEmptyKeys + stage, kGroups);
      init(base + kEmptyValues + stage, kGroups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kGroups == 2 ? 40 : 32));
    if (threadIdx.x != 0) return;
    copy(base + kQueries, q, kGroups * kQueryTile, base);
    for (int tile = 0; tile < tiles; ++tile) {
      const uint32_t stage = tile % kStages, parity = tile / kStages % 2 ^ 1;
      const size_t from = static_cast<size_t>(tile) * kTile;
      wait(base + kEmptyKeys + 8 * stage, parity);
      copy(keys + stage * kTile, k + from, kTile, base + kFullKeys + 8 * stage);
      wait(base + kEmptyValues + 8 * stage, parity);
      copy(values + stage * kTile, v + from, kTile, base + kFullValues + 8 * stage);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kGroups == 2 ? 232 : 160));
  const uint32_t group = threadIdx.x / 128 - 1;
  const uint64_t queries = descriptor(base + kQueries + group * kQueryTile);
  const bool speaks = threadIdx.x % 128 == 0;  // for its warpgroup
  float s[64], o[32] = {};
  uint32_t weights[32];
  Rows rows;
  const auto score = [&](int tile) {
    const uint32_t stage = tile % kStages;
    wait(base + kFullKeys + 8 * stage, tile / kStages % 2);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      multiply(s, queries + 2 * i, descriptor(keys + stage * kTile) + 2 * i, i > 0);
    commit();
  };
  const auto add_values = [&](int tile) {
    const uint32_t stage = tile % kStages;
    wait(base + kFullValues + 8 * stage, tile / kStages % 2);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      multiply(o, &weights[4 * i], descriptor(values + stage * kTile) + 128 * i);
    commit();
  };
  wait(base, 0);
  hold(s);
  begin();
  score(0);
  finish<0>();
  hold(s);
  if (speaks) arrive(base + kEmptyKeys);
  rows.weigh(s, scale);
  pack(weights, s);
  for (int tile = 1; tile < tiles; ++tile) {
    hold(s);
    hold(weights);
    hold(o);
    begin();
    score(tile);
    add_values(tile - 1);
    finish<1>();
    hold(s);
    if (speaks) arrive(base + kEmptyKeys + 8 * (tile % kStages));
    rows.weigh(s, scale);
    finish<0>();
    hold(o);
    hold(weights);
    if (speaks) arrive(base + kEmptyValues + 8 * ((tile - 1) % kStages));
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] *= rows.shrink[i / 2 % 2];
    pack(weights, s);
  }
  hold(weights);
  hold(o);
  begin();
  add_values(tiles - 1);
  finish<0>();
  hold(o);
  float factor[2];
  for (int half = 0; half < 2; ++half)
    factor[half] = 1.0f / quad(rows.sum[half], [](float x, float y) { return x + y; });
#pragma unroll
  for (int i = 0; i < 32; ++i)
    out[i * 128 * kGroups + threadIdx.x - 128] = o[i] * factor[i / 2 % 2];
}

}  // namespace

#define KERNEL(name, groups)                                                                  \
  extern "C" __global__ void __launch_bounds__(128 * (groups + 1), 1)                         \
      name(const char* q, const char* k, const char* v, float* out, int tiles, float scale) { \
    attention<groups>(q, k, v, out, tiles, scale);                                            \
  }
KERNEL(attention_of_two_warpgroups, 2)
KERNEL(attention_of_three_warpgroups, 3)
