"""Every fault of a kernel that the PTX interpreter looks for.

An interpreter that misses faults would be worse than none, so this makes each one and asks for the
message.
"""

import re

import pytest
import torch

from gpu_model.ptx.interpreter import Program
from tests.support.ptx_kernels import ADDRESSES, POLICIES, launch_all, program


def fault(body: str, message: str, *, warps: int = 2, seeds: int = 3, **options) -> None:
    """Whatever runs first: 64 numbers at %p0, 64 more at %p1, which may not be written."""
    kernel = program(body, 2, shared=1024, **options)
    for seed in range(seeds):
        for policy in POLICIES:
            out, x = torch.zeros(64), torch.ones(64)
            with pytest.raises(RuntimeError, match=message):
                kernel.launch("test", out, x, block=(32 * warps, 1, 1), policy=policy, seed=seed,
                              read_only=[x])  # fmt: skip


# Faults: body, message.
STORE = ADDRESSES + "st.shared.u32 [%r0], %t;"
FAULTS = {
    "race_between_warps": (
        STORE + "xor.b32 %r1, %r0, 128; ld.shared.u32 %r2, [%r1];",
        r"race: reads shared memory at offset \d+, written by thread|never written",
    ),
    "race_within_a_warp": (
        STORE + "xor.b32 %r1, %r0, 4; ld.shared.u32 %r2, [%r1];",
        r"race: reads shared memory at offset \d+, written by thread \(\d+, 0, 0\)",
    ),
    "warp_barrier_for_another_warp": (
        STORE + "bar.warp.sync -1; xor.b32 %r1, %r0, 128; ld.shared.u32 %r2, [%r1];",
        "race: reads|never written",
    ),
    "write_under_readers": (
        STORE + """bar.sync 0; mov.u32 %r1, memory; ld.shared.u32 %r2, [%r1];
        setp.eq.u32 %q0, %t, 40; @%q0 st.shared.u32 [%r1], 1;""",
        "race: (writes|reads) .*(read|written) by (the warp of )?thread",
    ),
    "two_writers": (
        "mov.u32 %r1, memory; st.shared.u32 [%r1], %t;",
        "race: writes shared memory at offset 0, written by thread",
    ),
    "atomic_and_plain": (
        STORE + """bar.sync 0; mov.u32 %r1, memory; atom.shared.add.u32 %r2, [%r1], 1;
        ld.shared.u32 %r3, [%r1];""",
        "race: ",
    ),
    "atomics_and_the_last_one_s_plain_load": (
        """mov.u32 %r1, memory; setp.eq.u32 %q0, %t, 0; @%q0 st.shared.u32 [%r1], 0; bar.sync 0;
        setp.ge.u32 %q0, %t, 32; @%q0 bra END; atom.shared.add.u32 %r2, [%r1], 1;
        setp.eq.u32 %q0, %t, 31; @%q0 ld.shared.u32 %r3, [%r1]; END:""",
        r"race: (reads|writes) shared memory at offset 0, (read|written) by",
    ),
    "atomics_of_another_warp": (
        """mov.u32 %r1, memory; setp.eq.u32 %q0, %t, 0; @%q0 st.shared.u32 [%r1], 0; bar.sync 0;
        and.b32 %r3, %t, 31; setp.eq.u32 %q0, %r3, 0; @%q0 atom.shared.add.u32 %r2, [%r1], 1;
        bar.warp.sync -1; setp.eq.u32 %q0, %t, 32; @%q0 ld.shared.u32 %r3, [%r1];""",
        r"race: (reads|writes) shared memory at offset 0, (read|written) by",
    ),
    "plain_store_under_an_atomic": (
        """mov.u32 %r1, memory; setp.eq.u32 %q0, %t, 0; @%q0 st.shared.u32 [%r1], 0;
        atom.shared.add.u32 %r2, [%r1], 1;""",
        "race: writes shared memory at offset 0, written by",
    ),
    "matrix_row_without_barrier": (
        STORE + """mov.u32 %r1, memory;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];""",
        "race: reads .* written by thread|never written",
    ),
    "uninitialised": (
        ADDRESSES + "ld.shared.u32 %r1, [%r0];",
        r"thread \(\d+, 0, 0\).*load of shared memory at offset \d+, which was never written",
    ),
    "shared_out_of_bounds": (
        ADDRESSES + "st.shared.u32 [%r0+1000], %t;",
        r"store of 4 bytes of shared memory at offset 1\d+, out of bounds: the block has 1024",
    ),
    "shared_offset_taken_for_an_address": (
        "shl.b32 %r0, %t, 2; st.shared.u32 [%r0], %t;",
        "out of bounds",
    ),
    "shared_misaligned": (
        ADDRESSES + "st.shared.v2.u32 [%r0], {%t, %t};",
        r"thread \((1|33|\d+), 0, 0\).*store of 8 bytes .* at offset \d+, which is no multiple",
    ),
    "global_out_of_bounds": (
        ADDRESSES + "ld.global.u32 %r1, [%a0+4];",
        r"load of 4 bytes of global memory out of bounds: at byte 256 of buffer 0, which has 256",
    ),
    "global_partly_outside": (
        "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%p0+256];",
        "load of 16 bytes of global memory out of bounds",
    ),
    "global_misaligned": (
        "ld.global.u64 %d0, [%p0+4];",
        "load of 8 bytes of global memory at an address that is no multiple of that",
    ),
    "global_far_away": ("mov.u64 %a0, 64; st.global.u32 [%a0], %t;", "far from every buffer"),
    "read_only": (ADDRESSES + "st.global.u32 [%a1], %t;", "store of 4 bytes .* read-only"),
    "copy_not_waited_for": (
        ADDRESSES + """cp.async.ca.shared.global [%r0], [%a1], 4; cp.async.commit_group;
        cp.async.wait_group 1; ld.shared.u32 %r1, [%r0];""",
        "destination of an asynchronous copy that was not waited for",
    ),
    "copy_not_committed": (
        ADDRESSES + """cp.async.ca.shared.global [%r0], [%a1], 4; cp.async.wait_group 0;
        ld.shared.u32 %r1, [%r0];""",
        "destination of an asynchronous copy that was not waited for",
    ),
    "copy_left_at_the_end": (
        ADDRESSES + "cp.async.ca.shared.global [%r0], [%a1], 4; cp.async.commit_group;",
        "an asynchronous copy is never waited for",
    ),
    "copy_without_barrier": (
        ADDRESSES + """cp.async.ca.shared.global [%r0], [%a1], 4; cp.async.wait_all;
        xor.b32 %r1, %r0, 4; ld.shared.u32 %r1, [%r1];""",
        "race: reads .* written by thread",
    ),
    "copy_over_unread_data": (
        STORE + """bar.sync 0; xor.b32 %r1, %r0, 4; ld.shared.u32 %r2, [%r1];
        cp.async.ca.shared.global [%r0], [%a1], 4; cp.async.wait_all;""",
        "race: writes .* read by thread",
    ),
    "copy_misaligned": (
        ADDRESSES + "cp.async.cg.shared.global [%r0], [%a1], 16; cp.async.wait_all;",
        "asynchronous copy of 16 bytes",
    ),
    "lane_skips_a_shuffle": (
        """setp.eq.u32 %q0, %t, 5; @%q0 bra SKIP; shfl.sync.bfly.b32 %r0, %t, 1, 31, -1;
        SKIP: bar.sync 0;""",
        "an operation of all lanes, but lane .* waits at line",
    ),
    "lane_exits_before_a_shuffle": (
        "setp.eq.u32 %q0, %t, 5; @%q0 exit; shfl.sync.bfly.b32 %r0, %t, 1, 31, -1;",
        "an operation of all lanes, but lane 5 of this warp has exited",
    ),
    "lanes_at_two_shuffles": (
        """and.b32 %r1, %t, 1; setp.eq.u32 %q0, %r1, 1; @%q0 bra ODD;
        shfl.sync.bfly.b32 %r0, %t, 1, 31, -1; bra END;
        ODD: shfl.sync.bfly.b32 %r0, %t, 1, 31, -1; END:""",
        "an operation of all lanes, but lane [01] of this warp waits at line",
    ),
    "mask_without_the_lane": (
        "elect.sync %r0|%q0, 0xff00;",
        "lane 0.*the mask of a lane does not name the lane",
    ),
    "masks_that_overlap": (
        """setp.lt.u32 %q0, %t, 16; selp.b32 %r1, 0xffff, -1, %q0;
        vote.sync.ballot.b32 %r0, %q0, %r1;""",
        "an operation of all lanes, but lane",
    ),
    "uniform_branch_of_some_lanes": (
        "setp.eq.u32 %q0, %t, 5; @%q0 bra.uni END; add.u32 %r0, %t, 1; END:",
        "bra.uni that only some of the lanes here take",
    ),
    "written_and_read_as_constant": (
        ADDRESSES + "st.global.u32 [%a0], %t; ld.global.nc.u32 %r1, [%a0];",
        "ld.global.nc of memory that this launch has written",
    ),
    "guarded_mma": (
        """mov.b32 %r0, 0; setp.lt.u32 %q0, %t, 16;
        @%q0 mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32
        {%r1, %r2, %r3, %r4}, {%r0, %r0}, {%r0}, {%r0, %r0, %r0, %r0};""",
        "an operation of all lanes, but lane (16|0) of this warp has exited",
    ),
    "warp_exits_before_a_barrier": (
        "setp.lt.u32 %q0, %t, 32; @%q0 bra END; bar.sync 0; END:",
        r"thread \(32, 0, 0\).*to which others never come; warp 0 has exited",
    ),
    "lane_misses_a_barrier": (
        "setp.eq.u32 %q0, %t, 40; @%q0 bra END; bar.sync 0; END:",
        "an operation of all lanes, but lane 8 of this warp has exited",
    ),
    "two_barriers": (
        """setp.lt.u32 %q0, %t, 32; @%q0 bra FIRST; bar.sync 1; bra END;
        FIRST: bar.sync 2; END:""",
        "to which others never come; warp 1 waits in sync_block at line .*, barrier 1",
    ),
    "trap": ("trap;", "trap"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name):
    body, message = FAULTS[name]
    fault(body, message)


def test_messages_name_kernel_block_thread_and_line():
    body = "mul.wide.u32 %a0, %t, 4; add.u64 %a0, %p0, %a0;\nst.global.u32 [%a0+200], %t;"
    kernel = program(body)
    line = kernel.texts["test.ptx"].splitlines().index("st.global.u32 [%a0+200], %t;") + 1
    message = re.escape(
        "test: block (0, 0, 0), thread (14, 0, 0) (warp 0, lane 14), "
        f"line {line} of its PTX, kernel test: store of 4 bytes"
    )
    with pytest.raises(RuntimeError, match=message):
        kernel.launch("test", torch.zeros(64), grid=(2, 1, 1), block=(16, 2, 1))


def test_races_between_blocks():
    """What one block writes no other may touch; each its own words, and atomics, are no race."""
    body = "mul.wide.u32 %a0, %t, 4; add.u64 %a0, %a0, %p0;" + "mul.wide.u32 %a1, %c, 128;"
    own = body + "add.u64 %a1, %a1, %a0;"
    first = "setp.eq.u32 %q0, %c, 0; @%q0 st.global.u32 [%a0], 1;"
    for text, message in {
        "st.global.u32 [%a0], 5;": "race: writes global memory that another block has written",
        first + "@!%q0 ld.global.u32 %r0, [%a0];": "race: .* that another block has (read|written)",
        "ld.global.u32 %r0, [%a0];" + first: "race: .* that another block has (read|written)",
        "red.global.add.u32 [%a0], 1; ld.global.u32 %r0, [%a0];": "race: ",
        "setp.eq.u32 %q0, %c, 0; @%q0 st.global.u32 [%a0], 1; red.global.add.u32 [%a0], 1;": "race",
    }.items():
        for policy in POLICIES:
            with pytest.raises(RuntimeError, match=message):
                program(body + text).launch("test", torch.zeros(96), grid=(3, 1, 1), policy=policy)
    # The last of the blocks reads what it has added to itself, and all others before it.
    last = "atom.global.add.u32 %r0, [%p0+64], 1; setp.eq.u32 %q0, %r0, 2;"
    for text in (
        last + "@%q0 ld.global.u32 %r1, [%p0+64];",
        last + "@%q0 st.global.u32 [%p0+64], 0;",
    ):
        with pytest.raises(RuntimeError, match=r"race: .* that another block has written"):
            program(body + text).launch("test", torch.zeros(96), grid=(3, 1, 1), block=(1, 1, 1))
    for text in (
        own + "ld.global.u32 %r0, [%a1]; st.global.u32 [%a1], 5;",
        body + "red.global.add.u32 [%a0], 1;",
        body + "ld.global.u32 %r0, [%a0];",
    ):
        program(text).launch("test", torch.zeros(96), grid=(3, 1, 1))


def test_the_last_block_reads_what_others_wrote_before_they_counted():
    """A counter with .acq_rel orders what a warp did, or has seen by barriers, before its count."""
    write = "mul.wide.u32 %a0, %c, 4; add.u64 %a0, %a0, %p0; st.global.u32 [%a0], 1;"
    other_warp = "setp.eq.u32 %q0, %t, 32; " + write.replace("st.", "@%q0 st.")
    count = """setp.ne.u32 %q1, %t, 0; @%q1 bra END;
    atom.acq_rel.gpu.global.inc.u32 %r0, [%p0+64], 2;"""
    read = """setp.ne.u32 %q2, %r0, 2; @%q2 bra END; ld.global.u32 %r1, [%p0];
    ld.global.u32 %r2, [%p0+4]; ld.global.u32 %r3, [%p0+8]; add.u32 %r1, %r1, %r2;
    add.u32 %r1, %r1, %r3; st.global.u32 [%p0+32], %r1; END:"""
    right = other_warp + "bar.sync 0;" + count + read
    for policy in POLICIES:
        memory = torch.zeros(32, dtype=torch.int32)
        program(right).launch("test", memory, grid=(3, 1, 1), block=(64, 1, 1), policy=policy)
        assert memory[8] == 3
        assert memory[16] == 0  # the counter wraps
    first = write.replace("st.", "setp.eq.u32 %q0, %t, 0; @%q0 st.")
    for wrong in (
        right.replace("bar.sync 0;", ""),
        right.replace(".acq_rel", ".relaxed"),
        right.replace(".acq_rel", "").replace(".gpu", ""),
        right.replace(".gpu", ".cta"),
        right.replace("[%p0+64]", "[%a0+64]").replace("%r0, 2", "%r0, 0"),  # counters of their own
        count + first + read,
    ):
        for policy in POLICIES:
            with pytest.raises(RuntimeError, match=r"race: .* another block has (read|written)"):
                program(wrong).launch(
                    "test", torch.zeros(32), grid=(3, 1, 1), block=(64, 1, 1), policy=policy
                )


LEGAL = {
    "warp_barrier": STORE + "bar.warp.sync -1; xor.b32 %r1, %r0, 4; ld.shared.u32 %r2, [%r1];",
    "block_barrier": STORE + "bar.sync 0; xor.b32 %r1, %r0, 128; ld.shared.u32 %r2, [%r1];",
    "named_barrier_of_both_warps": STORE
    + "bar.sync 3, 64; xor.b32 %r1, %r0, 128; ld.shared.u32 %r2, [%r1];",
    "producer_and_consumer": STORE
    + """setp.lt.u32 %q0, %t, 32; @%q0 bra PRODUCER;
    bar.sync 1, 64; xor.b32 %r1, %r0, 128; ld.shared.u32 %r2, [%r1]; bra END;
    PRODUCER: bar.arrive 1, 64; END:""",
    "own_word_again": STORE + "ld.shared.u32 %r1, [%r0]; st.shared.u32 [%r0], %r1;",
    "copies_of_barriers": STORE
    + """setp.lt.u32 %q0, %t, 32; @%q0 bra FIRST; bar.sync 0; bra END;
    FIRST: bar.sync 0; END: xor.b32 %r1, %r0, 128; ld.shared.u32 %r2, [%r1];""",
    "bytes_of_one_word": """mov.u32 %r0, memory; add.u32 %r0, %r0, %t; st.shared.u8 [%r0], %t;
    ld.shared.u8 %r1, [%r0];""",
    "copy_of_nothing": """mov.u32 %r0, memory; mad.lo.u32 %r0, %t, 16, %r0;
    cp.async.cg.shared.global [%r0], [%p1], 16, 0; cp.async.wait_all; ld.shared.u32 %r1, [%r0];""",
}


@pytest.mark.parametrize("name", LEGAL)
def test_what_is_ordered_is_no_race(name):
    memory = torch.zeros(80, dtype=torch.float32)
    x = memory[-memory.data_ptr() // 4 % 4 :][:64]
    launch_all(program(LEGAL[name], 2, shared=1024), torch.zeros(64), x)


def test_an_arrival_orders_one_way_and_what_was_before_it():
    body = (
        STORE
        + """setp.lt.u32 %q0, %t, 32; @%q0 bra PRODUCER; bar.sync 1, 64; ACTION bra END;
    PRODUCER: bar.arrive 1, 64; LATER END:"""
    )
    read = "xor.b32 %r1, %r0, 128; ld.shared.u32 %r2, [%r1];"
    fault(body.replace("ACTION", "").replace("LATER", read), "race: |never written")
    write = "st.shared.u32 [%r0], %t;"
    fault(body.replace("ACTION", read).replace("LATER", write), "race: ")


def test_text_that_is_not_understood_names_its_line():
    for body, message in {
        "frobnicate.b32 %r0, %r1;": r"line \d+, frobnicate.* is not known",
        "add.rz.f32 %r0, %r1, %r2;": r"the modifier \.rz is not known",
        "add.u32 %r0, %r1;": "expected 2 operands",
        "add.u32 %r0, %d0, 1;": "has another size",
        "mov.u32 %r0, %nothing;": "unknown operand %nothing",
        "bra NOWHERE;": "unknown label NOWHERE",
        "mov.xyz %r0, %r1;": "unknown type",
        "mov.b128 %d0, {%d1, %d2};": "unknown type",
        "selp.b128 %r0, %r1, %r2, %q0;": "unknown type",
        "redux.sync.add.f32 %r0, %r1, -1;": "unknown type of redux",
        "redux.sync.add.b32 %r0, %r1, -1;": "unknown type of redux",
        "redux.sync.and.u32 %r0, %r1, -1;": "unknown type of redux",
        "add.f32 %r0, %r1, 0d3FF0000000000000;": "constant 0d.* has another size than the type",
        "add.f64 %d0, %d1, 0f3F800000;": "constant 0f.* has another size than the type",
        "cp.async.cg.shared.global [%r0], [%p0], 8;": "expected a copy of 16 bytes",
        "cvt.rzi.ftz.s32.f64 %r0, %d0;": r"\.ftz is not known here",
        "slct.ftz.f32.s32 %r0, %r1, %r2, %r3;": r"the modifier \.ftz is not known",
    }.items():
        kernel = program(body)
        with pytest.raises(RuntimeError, match=message):
            kernel.decode("test")


def test_launches_are_checked():
    kernel = program("")
    for arguments, options, message in [
        ((), {}, "0 arguments; the kernel takes 1"),
        ((torch.zeros(1), torch.zeros(1)), {}, "2 arguments"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            kernel.launch("test", *arguments, **options)
    with pytest.raises(RuntimeError, match="no kernel other in the PTX"):
        kernel.launch("other", torch.zeros(1))
    small = Program({"a.ptx": ".visible .entry test() .maxntid 64, 1, 1 { ret; }"})
    small.launch("test", block=(64, 1, 1))
    with pytest.raises(RuntimeError, match="a block of 65 threads; the kernel is compiled for 64"):
        small.launch("test", block=(65, 1, 1))
