"""Mistakes around wgmma that the PTX interpreter finds on every schedule; what is right passes.

One kernel of 128 threads has a chain of wgmma; each case changes a part of its text.
"""

import pytest
import torch

from tests.support.ptx_kernels import POLICIES
from tests.support.wgmma_kernels import (
    Operand,
    fill,
    gathered,
    image_of,
    input_registers,
    kernel,
    product,
    store_sums,
)

BYTES = 16384
A = Operand(torch.randn(64, 64).bfloat16(), 1, True)
B = Operand(torch.randn(64, 64).bfloat16(), 1, True, start=8192)
IN_REGISTERS = "{%r10, %r11, %r12, %r13}"
LOAD_A = """mul.wide.u32 %a2, %t, 16; add.u64 %a2, %a2, %p2;
ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%a2];
"""
PROXY = "fence.proxy.async.shared::cta;\n"
BARRIER = "bar.sync 0;\n"
FENCE = "wgmma.fence.sync.aligned;\n"
COMMIT = "wgmma.commit_group.sync.aligned;\n"
WAIT = "wgmma.wait_group.sync.aligned 0;\n"
FIRST = product("bf16", 64, str(A.descriptor()), B.descriptor(), adds=False, majors="0, 0")
SECOND = product("bf16", 64, IN_REGISTERS, B.descriptor(1), majors="0")
END = store_sums(64, "%p1")
# %r0 is the thread's place in shared memory: of 16 bytes, which its own warp reads as A.
WHOLE = fill(BYTES) + LOAD_A + PROXY + BARRIER + FENCE + FIRST + SECOND + COMMIT + WAIT + END
STORE_A = "st.shared.v4.u32 [%r0], {%r1, %r2, %r3, %r4};\n"
STORE_B = "st.shared.v4.u32 [%r0+8192], {%r1, %r2, %r3, %r4};\n"


def run(text: str, policy: int, seed: int, *, warps: int = 4, sums: int = 128) -> torch.Tensor:
    out = torch.zeros(32 * max(warps, 4), 32)
    inputs = input_registers(A.matrix[:, 16:32]).repeat(max(warps // 4, 1) + 1, 1)
    kernel(text, 3, BYTES, sums=sums).launch(
        "test", image_of(BYTES, [A, B]), out, inputs, block=(32 * warps, 1, 1), policy=policy,
        seed=seed,
    )  # fmt: skip
    return out[:128]


def changed(before: str, after: str, text: str = WHOLE) -> str:
    assert text.count(before) == 1, before
    return text.replace(before, after)


CHECKED = "mov.b32 %r20, %f5;\n"
FAULTS = {
    "no_wait": (changed(WAIT, ""), "uses register %f0 of the wgmma at line .*no wgmma.wait_group"),
    "no_commit": (changed(COMMIT, ""), "uses register %f0 of the wgmma"),
    "wait_for_all_but_one": (changed(WAIT, WAIT.replace("0", "1")), "uses register %f0 of the"),
    "commit_of_another_group": (
        changed(SECOND + COMMIT, COMMIT + SECOND + COMMIT).replace(WAIT, WAIT.replace("0", "1")),
        "uses register %f0 of the wgmma",
    ),
    "exit_without_wait": (changed(WAIT + END, ""), "a wgmma is never waited for"),
    "sums_read_in_flight": (changed(COMMIT, CHECKED + COMMIT), "uses register %f5 of the wgmma"),
    "sums_written_in_flight": (
        changed(COMMIT, COMMIT + "mov.f32 %f31, 0f00000000;\n"),
        "uses register %f31 of the wgmma",
    ),
    "input_written_in_flight": (
        changed(COMMIT, COMMIT + "mov.b32 %r12, 0;\n"),
        "uses register %r12 of the wgmma",
    ),
    "input_read_in_flight": (
        changed(COMMIT, COMMIT + "add.u32 %r20, %r13, 1;\n"),
        "uses register %r13 of the wgmma",
    ),
    "sums_of_another_shape_in_flight": (
        changed(SECOND, SECOND.replace("n64", "n32").replace(
            ", ".join(f"%f{n}" for n in range(16, 32)) + "}", "}").replace(", }", "}")),
        "uses register %f0 after a wgmma that was not waited for, at line",
    ),
    "sums_as_input_in_flight": (
        changed(SECOND, SECOND.replace(IN_REGISTERS, "{%r10, %f1, %r12, %r13}")
                .replace("{%f0", "{%f64").replace("%f1,", "%f65,", 1)),
        "uses register %f1 after a wgmma that was not waited for",
    ),
    "no_fence": (changed(FENCE, ""), "the first wgmma, with no wgmma.fence before"),
    "no_fence_after_sums_were_read": (
        changed(END, CHECKED + SECOND + COMMIT + WAIT + END),
        "uses register %f5 after a use that no wgmma.fence follows, at line",
    ),
    "no_fence_after_sums_were_written": (
        changed(FENCE, FENCE + "mov.f32 %f7, 0f00000000;\n"),
        "uses register %f7 after a use that no wgmma.fence follows",
    ),
    "no_fence_after_input_was_written": (
        changed(SECOND, "add.u32 %r11, %r11, 0;\n" + SECOND),
        "uses register %r11 after a use that no wgmma.fence follows",
    ),
    "no_proxy_fence": (
        changed(PROXY, ""),
        "wgmma of shared memory at offset .*written by thread .*no fence.proxy.async between",
    ),
    "proxy_fence_before_the_write": (
        changed(PROXY, "").replace("mov.u32 %r0, memory;", PROXY + "mov.u32 %r0, memory;"),
        "no fence.proxy.async between",
    ),
    "proxy_fence_of_global_memory": (
        changed(PROXY, "fence.proxy.async.global;\n"), "no fence.proxy.async between",
    ),
    "proxy_fence_of_one_warp": (
        changed(PROXY, "setp.lt.u32 %q0, %t, 32;\n@%q0 " + PROXY), "no fence.proxy.async between",
    ),
    "proxy_fence_of_one_reader": (
        changed(PROXY + BARRIER, BARRIER + "setp.lt.u32 %q0, %t, 32;\n@%q0 " + PROXY),
        "no fence.proxy.async between",
    ),
    "no_barrier": (changed(BARRIER, ""), "race: reads shared memory .* written by|never"),
    "barrier_of_the_warp_only": (
        changed(BARRIER, "bar.warp.sync -1;\n"), "race: reads shared memory .* written by|never",
    ),
    "tile_overwritten_in_flight": (
        changed(WAIT, STORE_B + WAIT),
        "store of shared memory at offset .*which the wgmma at line .* reads, and no",
    ),
    "own_rows_overwritten_in_flight": (
        changed(WAIT, STORE_A + WAIT), "the wgmma at line .* reads, and no|race: reads .* written",
    ),
    "copied_over_in_flight": (
        changed(WAIT, "cp.async.cg.shared.global [%r0+8192], [%a0], 16;\n" + WAIT
                + "cp.async.wait_all;\n"),
        "which the wgmma at line .* reads, and no wgmma.wait_group",
    ),
    "memory_never_written": (
        changed(fill(BYTES), fill(BYTES - 2048)), "wgmma of shared memory at offset 14336, which",
    ),
    "out_of_bounds": (
        changed(str(B.descriptor(1)), str(B.descriptor(1) + (8192 >> 4))),
        "wgmma of 16 bytes of shared memory at offset 16416, out of bounds",
    ),
    "address_that_is_not_masked": (
        changed(str(B.descriptor(1)), str(B.descriptor(1) | 0x1000000 >> 4 >> 6)),
        "bits of a matrix descriptor are set that have no meaning",
    ),
    "warps_with_other_descriptors": (
        changed("mov.u64 %d1, " + str(B.descriptor(1)) + ";", f"""mov.u64 %d1, {B.descriptor(1)};
                setp.lt.u32 %q0, %t, 96; @%q0 mov.u64 %d1, {B.descriptor(2)};"""),
        "the warps of a warpgroup give different operands to one wgmma",
    ),
    "lanes_with_other_descriptors": (
        changed("mov.u64 %d1, " + str(B.descriptor(1)) + ";", f"""mov.u64 %d1, {B.descriptor(1)};
                setp.eq.u32 %q0, %t, 5; @%q0 mov.u64 %d1, {B.descriptor(2)};"""),
        "the lanes of a warp give different matrix descriptors",
    ),
    "lanes_that_differ_in_scale_d": (
        changed("setp.ne.b32 %q9, 1, 0;", "setp.ne.b32 %q9, %t, 5;"), "differ in scale-d",
    ),
    "a_warp_skips_a_wgmma": (
        changed(SECOND, "setp.lt.u32 %q0, %t, 32; @%q0 bra OVER;\n" + SECOND + "OVER:\n"),
        "have to execute the same, but another one came to line|give different operands",
    ),
    "a_warp_waits_for_less": (
        changed(WAIT, "setp.lt.u32 %q0, %t, 32; @%q0 bra OVER;\n" + WAIT
                + "bra BOTH;\nOVER: wgmma.wait_group.sync.aligned 0;\nBOTH:\n"),
        "have to execute the same, but another one came to line",
    ),
    "a_warp_exits": (
        changed(FENCE, "setp.lt.u32 %q0, %t, 32; @%q0 exit;\n" + FENCE),
        "waits for wgmma to which other warps of the warpgroup never come",
    ),
    "a_warp_exits_late": (
        changed(END, "setp.lt.u32 %q0, %t, 32; @%q0 exit;\n" + FENCE),
        "this warp exits, but others of its warpgroup come here",
    ),
    "a_lane_is_missing": (
        changed(SECOND, "setp.eq.u32 %q0, %t, 7; @%q0 exit;\n" + SECOND),
        "a wgmma is never waited for|an operation of all lanes, but lane 7",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_mistakes_are_found(name):
    text, message = FAULTS[name]
    for policy in POLICIES:
        for seed in range(3):
            with pytest.raises(RuntimeError, match=message):
                run(text, policy, seed)


@pytest.mark.parametrize("warps", [1, 2, 3, 5, 7])
def test_a_warpgroup_is_four_whole_warps(warps):
    first_ones_exit = "setp.lt.u32 %q0, %t, 128; @%q0 exit;\n" if warps > 4 else ""
    text = first_ones_exit + FENCE + FIRST + COMMIT + WAIT
    with pytest.raises(RuntimeError, match="of a warpgroup, but there are not 4 whole warps"):
        run(text, 0, 0, warps=warps)


ASYNC = "\n".join(
    ["mov.u32 %r0, memory; mad.lo.u32 %r0, %t, 16, %r0;",
     "mul.wide.u32 %a0, %t, 16; add.u64 %a0, %a0, %p0;"]
    + [f"cp.async.cg.shared.global [%r0+{at}], [%a0+{at}], 16;" for at in range(0, BYTES, 2048)]
    + ["cp.async.commit_group;\ncp.async.wait_group 0;\n"]
)  # fmt: skip
RIGHT = {
    "as_it_is": WHOLE,
    "proxy_fence_by_all_readers": changed(PROXY + BARRIER, BARRIER + PROXY),
    "proxy_fence_of_all_memory": changed(PROXY, "fence.proxy.async;\n"),
    "copied": changed(fill(BYTES), ASYNC),
    "two_groups": changed(SECOND + COMMIT, COMMIT + SECOND + COMMIT),
    "waits_one_after_the_other": changed(
        SECOND + COMMIT + WAIT, COMMIT + SECOND + COMMIT + WAIT.replace("0", "1") + WAIT
    ),
    "other_registers_in_flight": changed(COMMIT, COMMIT + "add.u32 %r20, %r2, 1;\n"),
    "tile_overwritten_after_the_barrier": changed(END, END + BARRIER + STORE_B),
    "own_rows_overwritten_after_the_wait": changed(WAIT, WAIT + BARRIER + STORE_A),
    "tile_read_in_flight": changed(WAIT, "ld.shared.u32 %r20, [%r0+8192];\n" + WAIT),
    "named_barrier": changed(BARRIER, "barrier.sync 3, 128;\n"),
    "registers_set_anew": changed(FENCE, "setmaxnreg.inc.sync.aligned.u32 240;\n" + FENCE),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name):
    want = A.matrix[:, :16].double() @ B.matrix[:, :16].double().T
    want += A.matrix[:, 16:32].double() @ B.matrix[:, 16:32].double().T
    for policy in POLICIES:
        for seed in range(4):
            out = gathered(run(RIGHT[name], policy, seed), 64)
            assert (out - want).abs().max() < 1e-4, (policy, seed)


def test_other_warps_need_a_barrier_to_write_what_was_read():
    """Warps 4 to 7 overwrite B: after a barrier at which the readers arrive behind their wait."""
    roles = "setp.ge.u32 %q0, %t, 128; @%q0 bra WRITER;\n"
    reader = FENCE + FIRST + COMMIT + WAIT + "bar.arrive 1, 256;\n" + END + "bra LAST;\n"
    writer = "WRITER: bar.sync 1, 256;\n" + STORE_B + "LAST:\n"
    text = fill(BYTES, 256) + PROXY + BARRIER + roles + reader + writer
    for policy in POLICIES:
        for seed in range(3):
            run(text, policy, seed, warps=8)
            for early in (
                changed("bar.sync 1, 256;\n", "", text).replace("bar.arrive 1, 256;\n", ""),
                changed(WAIT + "bar.arrive 1, 256;\n", "bar.arrive 1, 256;\n" + WAIT, text),
            ):
                with pytest.raises(
                    RuntimeError,
                    match=r"no wgmma|race: writes .* read by the wgmma at line|race: .* written by",
                ):
                    run(early, policy, seed, warps=8)


def test_a_warp_s_own_rows_of_a_need_no_barrier_of_the_block():
    """A warp reads its own 16 rows of A, but all of B."""
    own = PROXY + "bar.warp.sync -1;\n"
    # 8 threads hold a row of A: a turn of 128 threads fills 16 rows, those of one warp.
    lines = fill(BYTES).splitlines(keepends=True)
    start, b_part = "".join(lines[:2]), "".join(lines[2 + 8 :])
    rows = """shr.u32 %r30, %t, 5; and.b32 %r31, %t, 31; shl.b32 %r30, %r30, 11;
    mad.lo.u32 %r30, %r31, 64, %r30; mov.u32 %r32, memory; add.u32 %r32, %r32, %r30;
    cvt.u64.u32 %d9, %r30; add.u64 %a9, %p0, %d9;
    """
    for at in range(0, 64, 16):
        rows += f"""ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%a9+{at}];
        st.shared.v4.u32 [%r32+{at}], {{%r1, %r2, %r3, %r4}};
        """
    text = start + b_part + LOAD_A + PROXY + BARRIER + rows + own + FENCE + FIRST + COMMIT + WAIT
    want = A.matrix[:, :16].double() @ B.matrix[:, :16].double().T
    for policy in POLICIES:
        for seed in range(3):
            out = gathered(run(text + END, policy, seed), 64)
            assert (out - want).abs().max() < 1e-4
            with pytest.raises(RuntimeError, match=r"no fence\.proxy\.async between|race: reads"):
                run(text.replace(own, "bar.warp.sync -1;\n") + END, policy, seed)
            with pytest.raises(RuntimeError, match="race: reads"):
                run(text.replace(own, PROXY) + END, policy, seed)


def test_forms_that_are_not_understood_name_the_line():
    for before, after, message in (
        ("m64n64k16", "m64n60k16", "unknown shape of wgmma"),
        ("m64n64k16", "m64n64k32", "unknown shape of wgmma"),
        ("f32.bf16.bf16", "f16.f16.f16", "unknown types of wgmma"),
        ("f32.bf16.bf16", "f32.bf16.f16", "unknown types of wgmma"),
        ("%f31}", "%f31, %f32}", "expected 32 registers of sums"),
        ("1, 1, 0, 0;", "2, 1, 0, 0;", "expected -1 or 1, got 2"),
        ("1, 1, 0, 0;", "1, 1, 0, 2;", "expected 0 or 1, got 2"),
        (".sync.aligned.m64", ".sync.m64", "expected .aligned"),
    ):
        text = FIRST.replace(before, after)
        assert text != FIRST
        with pytest.raises(RuntimeError, match=r"line \d+, wgmma[^;]*: " + message):
            kernel(text, 1, 0).decode("test")
    for text, message in {
        "setmaxnreg.inc.sync.aligned.u32 20;": "expected a multiple of 8 from 24 to 256",
        "setmaxnreg.sync.aligned.u32 24;": "expected .inc or .dec",
    }.items():
        with pytest.raises(RuntimeError, match=message):
            kernel(text, 1, 0).decode("test")
