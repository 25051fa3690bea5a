// A ring of two stages, as producers and consumers of sm_90a have it: one thread copies 8,192 bytes
// a turn, four warps add them up.
#include <cstdint>

extern __shared__ __align__(1024) char memory[];

constexpr uint32_t kBytes = 8192, kData = 1024, kFull = 0, kEmpty = 16;

__device__ void wait(uint32_t mbarrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;\n}" ::"r"(mbarrier),
      "r"(parity)
      : "memory");
}

__device__ void init(uint32_t mbarrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(count) : "memory");
}

extern "C" __global__ void __launch_bounds__(160) ring(const char* in, float* out, int turns) {
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < 2; ++stage) {
      init(base + kFull + 8 * stage, 1);
      init(base + kEmpty + 8 * stage, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x > 128) return;
  float sum = 0.0f;
  for (int turn = 0; turn < turns; ++turn) {
    const uint32_t stage = turn % 2, parity = turn / 2 % 2;
    const uint32_t full = base + kFull + 8 * stage, empty = base + kEmpty + 8 * stage;
    const uint32_t data = base + kData + kBytes * stage;
    if (threadIdx.x == 128) {
      wait(empty, parity ^ 1);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(kBytes)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(data),
          "l"(__cvta_generic_to_global(in + kBytes * turn)), "r"(kBytes), "r"(full)
          : "memory");
    } else {
      wait(full, parity);
      for (uint32_t i = 0; i < 16; ++i) {
        float x;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(data + 512 * i + 4 * threadIdx.x));
        sum += x;
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty) : "memory");
    }
  }
  if (threadIdx.x < 128) out[threadIdx.x] = sum;
}
