// The forms of sm_90a's asynchronous instructions that the interpreter of PTX knows: what ptxas
// assembles, it decodes.
#include <cstdint>

extern "C" __global__ void __launch_bounds__(128)
    forms(float* out, const void* in, uint64_t a, uint64_t b, uint32_t shared, uint32_t count) {
  float d[4] = {};
  uint32_t r[4] = {1, 2, 3, 4};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#define D "{%0, %1, %2, %3}"
#define SUMS "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 " D
      ", %4, %5, p, 1, 1, 0, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 " D ", %4, %5, !p, -1, 1, 1, 0; }"
      : SUMS
      : "l"(a), "l"(b), "r"(count));
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 " D
      ", {%4, %5, %6, %7}, %8, p, 1, -1, 1; }"
      : SUMS
      : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(b), "r"(count));
  asm volatile(
      "wgmma.commit_group.sync.aligned;\n"
      "wgmma.wait_group.sync.aligned 1;\n"
      "wgmma.wait_group.sync.aligned 0;" ::
          : "memory");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 168;\n" ::: "memory");
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], %1;\n"
      "mbarrier.init.shared.b64 [%0+8], 1;\n"
      "fence.mbarrier_init.release.cluster;\n"
      "fence.proxy.async;\n"
      "fence.proxy.async.global;\n"
      "fence.proxy.async.shared::cta;\n"
      "mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;\n"
      "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%0];\n"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 64;\n"
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 64;\n"
      "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 64;\n"
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n"
      "cp.async.mbarrier.arrive.shared.b64 [%0];\n" ::"r"(shared),
      "r"(count)
      : "memory");
  asm volatile(
      "{ .reg .pred p; .reg .b64 state; .reg .b32 n;\n"
      "mbarrier.arrive.shared::cta.b64 state, [%0];\n"
      "mbarrier.arrive.noComplete.shared::cta.b64 state, [%0], 1;\n"
      "mbarrier.arrive_drop.shared::cta.b64 state, [%0];\n"
      "mbarrier.pending_count.b64 n, state;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra WAIT;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], 1, 1000;\n"
      "mbarrier.try_wait.shared::cta.b64 p, [%0], state;\n"
      "mbarrier.test_wait.shared::cta.b64 p, [%0], state;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%0], 0;\n"
      "mbarrier.inval.shared::cta.b64 [%0];\n"
      "elect.sync n|p, -1; }" ::"r"(shared),
      "r"(count)
      : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 64, [%2+8];\n"
      "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], "
      "%3, [%2], %4;\n"
      "bar.sync 1, 128; bar.arrive 2, 256; barrier.cta.sync 3; barrier.sync.aligned 4, 64;\n"
      "griddepcontrol.wait; griddepcontrol.launch_dependents;" ::"r"(shared + 1024),
      "l"(in), "r"(shared), "r"(count), "l"(a)
      : "memory");
  for (int i = 0; i < 4; ++i) out[threadIdx.x + 128 * i] = d[i];
}
