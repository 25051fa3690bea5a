"""The PTX interpreter's threads and memory: what lanes do together, and what they reach."""

import pytest
import torch

from tests.support.ptx_kernels import ADDRESSES, evaluate, launch_all, program
from tests.support.seeds import derived

LANES = torch.arange(32)


# Lanes of a warp


@pytest.mark.parametrize("mode", ["bfly", "up", "down", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles(mode, width):
    x = torch.randint(-(2**31), 2**31, (32,), dtype=torch.int64).int()
    amount = torch.randint(
        0, 32, (32,), generator=torch.Generator().manual_seed(derived(width))
    ).int()
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    text = f"""shfl.sync.{mode}.b32 y0|%q0, x0, x1, {clamp}, -1; selp.u32 y1, 1, 0, %q0;"""
    values, in_range = evaluate(text, [x, amount], torch.int32, torch.int32)
    for lane in range(32):
        n, first = int(amount[lane]), lane // width * width
        source = {"bfly": lane ^ n, "up": lane - n, "down": lane + n,
                  "idx": first + n % width}[mode]  # fmt: skip
        # Within the segment; a butterfly may also read an earlier one.
        low = -1000 if mode in ("bfly", "down") else first
        inside = low <= source < first + width
        assert bool(in_range[lane]) == inside, (lane, n)
        assert values[lane] == x[source if inside else lane]


def test_votes_and_reductions():
    bits = torch.randint(0, 2, (32,), generator=torch.Generator().manual_seed(derived(1))).int()
    x = torch.randint(-1000, 1000, (32,), generator=torch.Generator().manual_seed(derived(2))).int()
    text = """setp.ne.u32 %q0, x0, 0;
        vote.sync.ballot.b32 y0, %q0, -1;
        vote.sync.any.pred %q1, %q0, -1; selp.u32 y1, 1, 0, %q1;
        vote.sync.all.pred %q1, !%q0, -1; selp.u32 y2, 1, 0, %q1;
        redux.sync.add.s32 y3, x1, -1; redux.sync.min.s32 y4, x1, -1; redux.sync.max.u32 y5, x1, -1;
        redux.sync.xor.b32 y6, x1, -1; activemask.b32 y7;"""
    got = evaluate(text, [bits, x], *[torch.int32] * 8)
    numbers = x.tolist()
    unsigned = [v % 2**32 for v in numbers]
    total = 0
    for v in unsigned:
        total ^= v
    want = [sum(int(b) << i for i, b in enumerate(bits)), int(bits.any()), int(not bits.any()),
            sum(numbers), min(numbers), max(unsigned), total, 2**32 - 1]  # fmt: skip
    for y, value in zip(got, want, strict=True):
        assert (y == y[0]).all()
        assert int(y[0]) % 2**32 == value % 2**32


@pytest.mark.parametrize("low", [16, 5])
def test_lanes_with_other_masks_are_apart(low):
    """One instruction, with a mask for the lanes below `low` and one for the others."""
    body = f"""
    setp.lt.u32 %q1, %t, {low}; selp.b32 %r9, {2**low - 1}, {2**32 - 2**low}, %q1;
    setp.ne.u32 %q0, %t, 3; vote.sync.ballot.b32 %r0, %q0, %r9;
    vote.sync.all.pred %q2, %q0, %r9; selp.u32 %r1, 1, 0, %q2;
    redux.sync.add.u32 %r2, %t, %r9; elect.sync %r3|%q3, %r9;
    sub.u32 %r5, {low - 1}, %t; @!%q1 sub.u32 %r5, {low + 31}, %t;
    shfl.sync.idx.b32 %r4, %t, %r5, 31, %r9;
    mul.wide.u32 %a0, %t, 32; add.u64 %a0, %a0, %p0;
    st.global.v4.u32 [%a0], {{%r0, %r1, %r2, %r3}}; st.global.u32 [%a0+16], %r4;
    """
    out = torch.zeros(32, 8, dtype=torch.int32)
    launch_all(program(body), out, warps=1)
    for lane in range(32):
        group = range(low) if lane < low else range(low, 32)
        want = [sum(1 << k for k in group if k != 3), int(3 not in group), sum(group), group[0],
                group[-1] - (lane - group[0])]  # fmt: skip
        assert [int(v) % 2**32 for v in out[lane, :5]] == want, lane


def test_a_mask_of_some_lanes():
    body = """
    and.b32 %r1, %t, 24; setp.ne.u32 %q0, %r1, 8; @%q0 bra END;
    elect.sync %r0|%q1, 0xff00; redux.sync.or.b32 %r2, %t, 0xff00;
    mul.wide.u32 %a0, %t, 8; add.u64 %a0, %a0, %p0; st.global.v2.u32 [%a0], {%r0, %r2}; END:
    """
    out = torch.zeros(32, 2, dtype=torch.int32)
    launch_all(program(body), out, warps=1)
    want = torch.zeros(32, 2, dtype=torch.int32)
    want[8:16] = torch.tensor([8, 15])
    assert torch.equal(out, want)


def test_lanes_part_and_meet_again():
    """A loop that each lane leaves at another time, with branches in it, then a vote of all."""
    body = """
    mov.u32 %r0, 0; mov.u32 %r1, %t;
    LOOP:
    setp.eq.u32 %q0, %r1, 0;
    @%q0 bra DONE;
    and.b32 %r2, %r1, 1;
    setp.eq.u32 %q1, %r2, 1;
    @%q1 bra ODD;
    add.u32 %r0, %r0, 10;
    bra.uni NEXT;
    ODD: add.u32 %r0, %r0, 1;
    NEXT: sub.u32 %r1, %r1, 1;
    bra.uni LOOP;
    DONE:
    setp.gt.u32 %q2, %r0, 20;
    vote.sync.ballot.b32 %r3, %q2, -1;
    mul.wide.u32 %a0, %t, 8; add.u64 %a0, %a0, %p0;
    st.global.v2.u32 [%a0], {%r0, %r3};
    """
    out = torch.zeros(32, 2, dtype=torch.int32)
    launch_all(program(body), out, warps=1)
    sums = (LANES + 1) // 2 + 10 * (LANES // 2)
    assert torch.equal(out[:, 0].long(), sums)
    ballot = sum(1 << int(lane) for lane in LANES if sums[lane] > 20)
    assert torch.equal(out[:, 1].long() % 2**32, torch.full((32,), ballot))


def test_asm_scopes_have_registers_and_labels_of_their_own():
    text = """{ .reg .b32 a, b; mov.b32 a, x0; setp.eq.u32 %q0, a, 0; @%q0 bra SKIP;
                add.u32 a, a, 1; SKIP: mov.b32 y0, a; }
              { .reg .b32 a; mov.b32 a, 5; { .reg .b32 a; mov.b32 a, 7; } mov.b32 y1, a; }"""
    x = torch.arange(64).int() % 3
    y, z = evaluate(text, [x], torch.int32, torch.int32)
    assert torch.equal(y, torch.where(x == 0, 0, x + 1).int())
    assert (z == 5).all()


def test_special_registers():
    body = """
    mov.u32 %r0, %tid.y; mov.u32 %r1, %ntid.x; mov.u32 %r2, %nctaid.y; mov.u32 %r3, %ctaid.y;
    mov.u32 %r4, %laneid; mov.u32 %r5, %tid.z;
    mad.lo.u32 %r6, %r0, %r1, %t; mov.u32 %r7, %ntid.y; mul.lo.u32 %r8, %r7, %r1;
    mad.lo.u32 %r6, %r5, %r8, %r6;
    mov.u32 %r9, %nctaid.x; mad.lo.u32 %r10, %r3, %r9, %c;
    mad.lo.u32 %r6, %r10, 64, %r6;
    mul.wide.u32 %a0, %r6, 16; add.u64 %a0, %a0, %p0;
    st.global.v4.u32 [%a0], {%t, %r0, %r5, %r3};
    """
    out = torch.zeros(6, 2, 4, 8, 4, dtype=torch.int32)
    program(body).launch("test", out, grid=(3, 2, 1), block=(8, 4, 2), policy=1, seed=3)
    block, z, y, x = torch.meshgrid(*map(torch.arange, (6, 2, 4, 8)), indexing="ij")
    assert torch.equal(out.long(), torch.stack([x, y, z, block // 3], -1))


# Memory


def test_loads_extend_and_stores_cut():
    x = torch.tensor([0x80, 0x7F, 0xFF, 1], dtype=torch.uint8)
    body = """
    ld.global.u8 %r0, [%p0]; ld.global.s8 %r1, [%p0]; ld.global.s8 %d0, [%p0+2];
    ld.global.u16 %r2, [%p0]; ld.global.s16 %r3, [%p0+2]; ld.global.s32 %d1, [%p0];
    st.global.u32 [%p1], %r0; st.global.u32 [%p1+4], %r1; st.global.u64 [%p1+8], %d0;
    st.global.u32 [%p1+16], %r2; st.global.u32 [%p1+20], %r3; st.global.u64 [%p1+24], %d1;
    st.global.u8 [%p1+32], %r1; st.global.u16 [%p1+34], %d0;
    """
    out = torch.zeros(9, dtype=torch.int32)
    program(body, 2).launch("test", x, out, block=(1, 1, 1))
    wide = out[:8].view(torch.int64)
    word = int.from_bytes(bytes(x.tolist()), "little")
    assert out[:2].tolist() == [0x80, -0x80]
    assert wide[1] == -1
    assert out[4:6].tolist() == [0x7F80, 0x01FF]
    assert wide[3] == word
    assert int(out[8]) % 2**32 == 0xFFFF0080


def test_atomics_of_all_threads():
    body = (
        ADDRESSES
        + """
    mov.u32 %r1, memory; setp.eq.u32 %q0, %t, 0; @%q0 st.shared.u32 [%r1], 0; bar.sync 0;
    atom.shared.add.u32 %r2, [%r1], 1; red.global.max.s32 [%p0], %t;
    atom.global.add.f32 %r3, [%p0+4], 0f3F000000;
    atom.global.cas.b32 %r4, [%p0+8], 0, %t;
    bar.sync 0; ld.shared.u32 %r5, [%r1]; st.global.u32 [%p0+12], %r5;
    mul.wide.u32 %a3, %r2, 4; add.u64 %a3, %a3, %p1; st.global.u32 [%a3], 1;
    """
    )
    for seed in range(3):
        out, marks = torch.zeros(4, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        program(body, 2, shared=64).launch(
            "test", out, marks, block=(64, 1, 1), policy=1, seed=seed
        )
        assert out[0] == 63
        assert out[1:2].view(torch.float32) == 32
        assert 0 < out[2] < 64
        assert out[3] == 64
        assert (marks == 1).all()


def test_atomic_sums_wrap():
    body = """red.global.add.s32 [%p0], 5; red.global.add.s64 [%p1], 5;"""
    low, wide = torch.tensor([2**31 - 3]).int(), torch.tensor([2**63 - 3])
    program(body, 2).launch("test", low, wide, block=(1, 1, 1))
    assert int(low) == -(2**31) + 2
    assert int(wide) == -(2**63) + 2


def test_generic_addresses_reach_every_window():
    body = (
        ADDRESSES
        + """
    cvt.u64.u32 %a3, %r0; cvta.shared.u64 %a3, %a3; cvta.global.u64 %a4, %a0;
    st.u32 [%a3], %t; ld.u32 %r1, [%a3]; st.u32 [%a4], %r1;
    cvta.to.shared.u64 %a5, %a3; cvt.u32.u64 %r2, %a5; ld.shared.u32 %r3, [%r2];
    mov.u64 %a6, p1; cvta.param.u64 %a6, %a6; ld.u64 %a7, [%a6]; setp.ne.u64 %q0, %a7, %p1;
    @%q0 trap; setp.ne.u32 %q0, %r3, %t; @%q0 trap;
    """
    )
    out, x = torch.zeros(64, dtype=torch.int32), torch.zeros(64)
    launch_all(program(body, 2, shared=1024), out, x)
    assert torch.equal(out.long(), torch.arange(64))


def test_local_memory_and_constants():
    text = """.local .align 8 .b8 depot[16]; mov.u64 %a9, depot; cvta.local.u64 %a8, %a9;
        st.u32 [%a8+4], x0; mov.u64 %a7, table; cvta.global.u64 %a7, %a7; ld.u32 y0, [%a7+8];
        ld.local.u32 y1, [%a9+4];"""
    body = (
        text.replace("x0", "%t").replace("y0", "%r0").replace("y1", "%r1")
        + """
        mul.wide.u32 %a0, %t, 8; add.u64 %a0, %a0, %p0; st.global.v2.u32 [%a0], {%r0, %r1};"""
    )
    out = torch.zeros(64, 2, dtype=torch.int32)
    launch_all(program(body, extra=".global .align 4 .u32 table[3] = {5, 6, 0x7};"), out)
    assert torch.equal(out, torch.stack([torch.full((64,), 7), torch.arange(64)], 1).int())


def test_asynchronous_copies_read_early_or_late():
    """One group of two that is waited for has landed, the other not; sources are read at any
    time between."""
    body = (
        ADDRESSES
        + """
    add.u32 %r1, %r0, 256;
    cp.async.ca.shared.global [%r0], [%a1], 4; cp.async.commit_group;
    cp.async.ca.shared.global [%r1], [%a1], 4, 0; cp.async.commit_group;
    mov.u32 %r5, 0f40000000; st.global.u32 [%a1], %r5;
    cp.async.wait_group 1; ld.shared.u32 %r2, [%r0];
    cp.async.wait_all; ld.shared.u32 %r3, [%r1];
    setp.ne.u32 %q0, %r3, 0; @%q0 trap;
    st.global.u32 [%a0], %r2;
    """
    )
    kernel, seen = program(body, 2, shared=1024), set()
    for seed in range(6):
        out = torch.zeros(64)
        kernel.launch("test", out, torch.ones(64), block=(64, 1, 1), seed=seed)
        seen |= set(out.tolist())
    assert seen == {1.0, 2.0}


def test_the_seed_decides_the_order_of_blocks():
    body = "atom.global.exch.b32 %r0, [%p0], %c;"
    last = set()
    for seed in range(8):
        out = torch.zeros(1, dtype=torch.int32)
        program(body).launch("test", out, grid=(4, 1, 1), block=(1, 1, 1), policy=1, seed=seed)
        last.add(int(out))
    assert len(last) > 1
