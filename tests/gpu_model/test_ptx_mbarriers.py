"""The PTX interpreter's mbarriers, bulk copies, and copies that arrive at mbarriers."""

import re

import pytest
import torch

from tests.support.ptx_kernels import POLICIES, program

# mbarriers at offset 0, 8, ...; data from 1,024 on.
SHARED = 1024 + 8192
PLACE = "mov.u32 %r0, memory; mad.lo.u32 %r1, %t, 4, %r0; mul.wide.u32 %a2, %t, 4;\n"
ONE = "setp.eq.u32 %q1, %t, 0;\n"


def init(count: int, at: int = 0) -> str:
    return f"@%q1 mbarrier.init.shared::cta.b64 [%r0+{at}], {count};\n"


PUBLISH = "fence.mbarrier_init.release.cluster;\nbar.sync 0;\n"


def wait(parity: int, at: int = 0) -> str:
    return f"""{{
    AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %q2, [%r0+{at}], {parity}; @!%q2 bra AGAIN;
    }}
    """


def arrive(at: int = 0) -> str:
    return f"mbarrier.arrive.shared::cta.b64 _, [%r0+{at}];\n"


def bulk(bytes_: int, *, to: int = 1024, source: str = "%p0", at: int = 0) -> str:
    return f"""@%q1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [%r0+{to}], [{source}], {bytes_}, [%r0+{at}];
    """


def expect(bytes_: int) -> str:
    return f"@%q1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0], {bytes_};\n"


def passes(body: str, *tensors: torch.Tensor, warps: int = 2, seeds: int = 4) -> list[list]:
    """Runs on all schedules, and gives what the tensors hold after each."""
    kernel = program(PLACE + ONE + body, len(tensors), shared=SHARED)
    results = []
    for policy in POLICIES:
        for seed in range(seeds):
            copies = [aligned(t) for t in tensors]
            kernel.launch("test", *copies, block=(32 * warps, 1, 1), policy=policy, seed=seed)
            results.append(copies)
    return results


def fails(body: str, message: str, *tensors: torch.Tensor, warps: int = 2, seeds: int = 4) -> None:
    kernel = program(PLACE + ONE + body, len(tensors), shared=SHARED)
    for policy in POLICIES:
        for seed in range(seeds):
            with pytest.raises(RuntimeError, match=message):
                kernel.launch("test", *map(aligned, tensors), block=(32 * warps, 1, 1),
                              policy=policy, seed=seed)  # fmt: skip


def aligned(x: torch.Tensor) -> torch.Tensor:
    """A copy that begins at a multiple of 16 bytes."""
    room = torch.zeros(x.numel() + 16, dtype=x.dtype)
    first = -room.data_ptr() % 16 // x.element_size()
    room[first : first + x.numel()] = x
    return room[first : first + x.numel()]


NUMBERS = torch.arange(2048).int()
OUT = torch.zeros(256).int()


# Bulk copies


LOAD = "ld.shared.u32 %r5, [%r1+1024]; add.u64 %a3, %p1, %a2; st.global.u32 [%a3], %r5;\n"
COPY = init(1) + PUBLISH + expect(256) + bulk(256) + wait(0) + LOAD


def test_a_bulk_copy_is_read_behind_its_phase():
    for _, out in passes(COPY, NUMBERS, OUT):
        assert torch.equal(out[:64], NUMBERS[:64])


NOT_SEEN = "not waited for|race: reads .* written by the bulk copy at line"
STORE = "st.shared.u32 [%r1+1024], 1;\n"


@pytest.mark.parametrize(("before", "after", "message"), [
    (wait(0), "", NOT_SEEN + "|never written|race: writes .* read"),
    (wait(0), wait(1), NOT_SEEN + "|never written|race: writes .* read|never completes"),
    (expect(256), "@%q1 " + arrive(), NOT_SEEN),
    (expect(256), expect(512), "waits for a phase of an mbarrier that never completes"),
    (expect(256), expect(128), "more bytes have come than it expects"),
    (init(1), init(2), "waits for a phase of an mbarrier that never completes"),
    (PUBLISH, "bar.sync 0;\n", r"initialised with no fence\.mbarrier_init or fence\.proxy\.async"),
    (PUBLISH, "fence.mbarrier_init.release.cluster;\n", "is no mbarrier|race: writes .* written"),
    (bulk(256), bulk(256, to=1028), "a bulk copy of 256 bytes .* at offset 1028, which is no mult"),
    (bulk(256), bulk(256, source="%p0+4"), "both addresses have to be multiples of 16"),
    (bulk(256), bulk(250), "a bulk copy of 250 bytes: its size"),
    (bulk(256), bulk(16384), "a bulk copy of 16384 bytes of shared memory .* out of bounds"),
    (bulk(256), bulk(256, source="%p0+8160"), "asynchronous copy of 16 bytes of global memory"),
    (bulk(256), bulk(256, at=8), "is no mbarrier: mbarrier.init has not come here"),
    (wait(0) + LOAD, "", "a bulk copy is never waited for"),
    (LOAD, "ld.shared.u32 %r5, [%r0];" + LOAD, "load of .*which is an mbarrier since line"),
    (PUBLISH, PUBLISH + init(1) + "bar.sync 0;\n", "mbarrier.init of .*which is an mbarrier"),
    (expect(256), STORE + "bar.sync 0;\n" + expect(256),
     r"bulk copy of .* written by thread .* no fence\.proxy\.async between"),
    (bulk(256), bulk(256) + STORE, "destination of an asynchronous|race: writes"),
])  # fmt: skip
def test_mistakes_with_bulk_copies_are_found(before, after, message):
    assert COPY.count(before) == 1
    fails(COPY.replace(before, after), message, NUMBERS, OUT)


def test_threads_that_look_only_once_pass_where_copies_land_early_but_not_late():
    """After a barrier, at which an early copy lands."""
    looks_once = "bar.sync 0;\n" + wait(0).replace("@!%q2 bra AGAIN;", "")
    kernel = program(PLACE + ONE + COPY.replace(wait(0), looks_once), 2, shared=SHARED)

    def faults(timing: str) -> list[str]:
        found = []
        for policy in POLICIES:
            for seed in range(16):
                try:
                    kernel.launch("test", aligned(NUMBERS), aligned(OUT), block=(64, 1, 1),
                                  policy=policy, seed=seed, timing=timing)  # fmt: skip
                except RuntimeError as error:
                    found.append(str(error))
        return found

    assert len(faults("seeded")) < 48
    late = faults("late")
    assert len(late) == 48
    assert all(re.search(NOT_SEEN, error) for error in late)


def test_memory_that_threads_wrote_may_be_copied_over_behind_a_fence():
    text = COPY.replace(
        expect(256),
        "st.shared.u32 [%r1+1024], 1; fence.proxy.async.shared::cta; bar.sync 0;\n" + expect(256),
    )
    for _, out in passes(text, NUMBERS, OUT):
        assert torch.equal(out[:64], NUMBERS[:64])


def test_a_bulk_copy_reads_early_or_late():
    text = COPY.replace(wait(0), "@%q1 st.global.u32 [%p0], 77;\n" + wait(0))
    seen = {int(out[0]) for _, out in passes(text, NUMBERS, OUT, seeds=8)}
    assert seen == {0, 77}


# A ring of two stages: warp 0 copies, warps 1 and 2 read, six turns.
RING = """
{init}
bar.sync 0;
mov.u32 %r10, 0;
setp.lt.u32 %q3, %t, 32; @%q3 bra PRODUCER;
CONSUME:
and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1;
mad.lo.u32 %r13, %r11, 8, %r0;
FULL: mbarrier.try_wait.parity.shared::cta.b64 %q2, [%r13], %r12; @!%q2 bra FULL;
mad.lo.u32 %r14, %r11, 2048, %r1;
ld.shared.u32 %r15, [%r14+1024];
mad.lo.u32 %r16, %r10, 512, 0; cvt.u64.u32 %d3, %r16; add.u64 %a4, %p1, %d3; add.u64 %a4, %a4, %a2;
st.global.u32 [%a4], %r15;
{release}
add.u32 %r10, %r10, 1; setp.lt.u32 %q4, %r10, 6; @%q4 bra CONSUME;
bra END;
PRODUCER:
elect.sync %r20|%q5, -1; @!%q5 bra END;
PRODUCE:
and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1; xor.b32 %r12, %r12, 1;
mad.lo.u32 %r13, %r11, 8, %r0;
{empty}
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r13], 512;
mad.lo.u32 %r14, %r11, 2048, %r0;
mul.wide.u32 %d4, %r10, 512; add.u64 %a5, %p0, %d4;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r14+1024], [%a5], 512, [%r13];
add.u32 %r10, %r10, 1; setp.lt.u32 %q4, %r10, 6; @%q4 bra PRODUCE;
END:
"""
RING_INIT = init(1) + init(1, 8) + init(64, 16) + init(64, 24) + "fence.proxy.async;\n"
EMPTY = "EMPTY: mbarrier.try_wait.parity.shared::cta.b64 %q2, [%r13+16], %r12; @!%q2 bra EMPTY;"
RELEASE = "mbarrier.arrive.shared::cta.b64 %d5, [%r13+16];"


def ring(**changes: str) -> str:
    return RING.format(**{"init": RING_INIT, "release": RELEASE, "empty": EMPTY} | changes)


LEADER = "and.b32 %r21, %t, 31; setp.eq.u32 %q6, %r21, 0; @%q6 " + RELEASE
LEADERS = RING_INIT.replace(", 64;", ", 2;")


@pytest.mark.parametrize("changes", [
    {},
    {"empty": EMPTY.replace("try_wait", "test_wait")},
    {"init": LEADERS, "release": "bar.warp.sync -1; " + LEADER},
], ids=["all", "test_wait", "one_lane"])  # fmt: skip
def test_a_ring_of_bulk_copies(changes):
    want = NUMBERS[: 6 * 128].view(6, 128)[:, 32:96]
    for _, out in passes(ring(**changes), NUMBERS, torch.zeros(1024).int(), warps=3):
        assert torch.equal(out[: 6 * 128].view(6, 128)[:, 32:96], want)


SOMETHING = "race: |never completes|destination of an asynchronous|arrivals at an mbarrier"


@pytest.mark.parametrize(("changes", "message"), [
    ({"empty": ""}, SOMETHING),
    ({"empty": EMPTY.replace("%r12;", "0;")}, "never completes"),
    ({"release": ""}, "waits for a phase of an mbarrier that never completes"),
    ({"init": RING_INIT.replace(", 64;", ", 32;")}, SOMETHING),
    ({"init": LEADERS, "release": LEADER}, "race: writes .* read by"),
    ({"init": LEADERS}, SOMETHING),
    ({"release": RELEASE.replace("arrive.", "arrive.relaxed.cta.")}, "race: writes "),
])  # fmt: skip
def test_mistakes_with_a_ring_are_found(changes, message):
    fails(ring(**changes), message, NUMBERS, torch.zeros(1024).int(), warps=3)


def test_what_one_lane_waits_for_others_have_not_seen():
    text = COPY.replace(wait(0), "@!%q1 bra BEHIND;\n" + wait(0) + "BEHIND:\n")
    fails(text, "not waited for|race: reads .* written by the bulk copy", NUMBERS, OUT, warps=1)
    behind = text.replace("BEHIND:\n", "BEHIND: bar.warp.sync -1;\n")
    for _, out in passes(behind, NUMBERS, OUT, warps=1):
        assert torch.equal(out[:32], NUMBERS[:32])


# Copies of threads that arrive at an mbarrier


THREADS = init(64) + "bar.sync 0;\n" + """
add.u64 %a3, %p0, %a2; cp.async.ca.shared.global [%r1+1024], [%a3], 4;
cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r0];
""" + "{}" + """
xor.b32 %r6, %r1, 4; ld.shared.u32 %r5, [%r6+1024];
add.u64 %a3, %p1, %a2; st.global.u32 [%a3], %r5;
"""  # fmt: skip


def test_copies_of_threads_arrive():
    want = NUMBERS[:64].view(32, 2).flip(1).flatten()
    for _, out in passes(THREADS.format(wait(0)), NUMBERS, OUT):
        assert torch.equal(out[:64], want)
    # One arrival each that nobody expects, and one that is expected.
    counted = THREADS.replace(".noinc", "").format(arrive() + wait(0))
    for _, out in passes(counted, NUMBERS, OUT):
        assert torch.equal(out[:64], want)


def test_mistakes_with_copies_that_arrive_are_found():
    message = "not waited for|race: reads .* written by"
    fails(THREADS.format(""), message, NUMBERS, OUT)
    fails(THREADS.format(wait(1)), message, NUMBERS, OUT)
    fails(THREADS.format(arrive() + wait(0)), SOMETHING, NUMBERS, OUT)
    uncounted = THREADS.replace(".noinc", "").format(wait(0))
    fails(uncounted, "waits for a phase of an mbarrier that never completes", NUMBERS, OUT)


# What arrivals count


def test_states_and_counts():
    body = init(3) + PUBLISH + """@!%q1 bra END;
    mbarrier.arrive.shared.b64 %d1, [%r0]; mbarrier.pending_count.b64 %r5, %d1;
    st.global.u32 [%p0], %r5;
    mbarrier.arrive.noComplete.shared.b64 %d2, [%r0], 1; mbarrier.pending_count.b64 %r5, %d2;
    st.global.u32 [%p0+4], %r5;
    mbarrier.test_wait.shared.b64 %q2, [%r0], %d2; selp.u32 %r5, 1, 0, %q2;
    st.global.u32 [%p0+8], %r5;
    mbarrier.arrive_drop.shared.b64 %d3, [%r0];
    mbarrier.test_wait.shared.b64 %q2, [%r0], %d3; selp.u32 %r5, 1, 0, %q2;
    st.global.u32 [%p0+12], %r5;
    mbarrier.arrive.release.cta.shared::cta.b64 %d4, [%r0], 2;
    mbarrier.pending_count.b64 %r5, %d4; st.global.u32 [%p0+16], %r5;
    mbarrier.try_wait.acquire.cta.shared::cta.b64 %q2, [%r0], %d4, 1000; selp.u32 %r5, 1, 0, %q2;
    st.global.u32 [%p0+20], %r5;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r0], 64;
    mbarrier.arrive.shared.b64 %d5, [%r0], 2;
    mbarrier.test_wait.parity.shared.b64 %q2, [%r0], 0; selp.u32 %r5, 1, 0, %q2;
    st.global.u32 [%p0+24], %r5;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r0], 64;
    cvt.u64.u32 %d6, %r0; cvta.shared.u64 %d6, %d6;
    mbarrier.test_wait.parity.b64 %q2, [%d6], 0; selp.u32 %r5, 1, 0, %q2;
    st.global.u32 [%p0+28], %r5;
    mbarrier.inval.shared.b64 [%r0]; mbarrier.init.shared.b64 [%r0], 1;
    mbarrier.test_wait.parity.shared.b64 %q2, [%r0], 1; selp.u32 %r5, 1, 0, %q2;
    st.global.u32 [%p0+32], %r5; END:
    """  # fmt: skip
    for (out,) in passes(body, OUT):
        assert out[:9].tolist() == [3, 2, 0, 1, 2, 1, 0, 1, 1]


FIRST = "@%q1 mbarrier."


@pytest.mark.parametrize(("text", "message"), [
    (FIRST + "expect_tx.shared.b64 [%r0], 16;\n" + 2 * ("@%q1 " + arrive()),
     "1 arrivals at an mbarrier that expects 0 more of 1 in this phase"),
    (FIRST + "arrive.shared.b64 _, [%r0], 2;", "2 arrivals at an mbarrier that expects 1 more"),
    (FIRST + "arrive.noComplete.shared.b64 _, [%r0], 1;", "noComplete that completes a phase"),
    (FIRST + "arrive.shared.b64 _, [%r0+8];", "is no mbarrier"),
    (FIRST + "arrive.shared.b64 _, [%r0+4];", "an mbarrier of 8 bytes .* no multiple"),
    (FIRST + "arrive.shared.b64 _, [%r0+90000];", "an mbarrier of 8 bytes .* out of bounds"),
    (FIRST + "arrive.b64 _, [%p0];", "an mbarrier of 8 bytes .* out of bounds"),
    (FIRST + "expect_tx.relaxed.cta.shared.b64 [%r0], 2000000;", "has over 20 bits"),
    (FIRST + "inval.shared.b64 [%r0]; bar.sync 0;" + arrive(), "is no mbarrier"),
    (FIRST + "init.shared.b64 [%r0+8], 0;", "an mbarrier that expects 0 arrivals"),
    (wait(0), "of an mbarrier that never completes; warp 1 waits for an mbarrier at line"),
    ("mov.u64 %d1, 99999999999; mbarrier.test_wait.shared.b64 %q2, [%r0], %d1;", "a state that is"),
])  # fmt: skip
def test_mistakes_with_mbarriers_are_found(text, message):
    fails(init(1) + PUBLISH + text, message, NUMBERS)


def test_an_mbarrier_needs_a_barrier_behind_its_init():
    fails(init(64) + arrive() + wait(0), "race: writes .* written by|is no mbarrier", NUMBERS)


def test_fences_of_unknown_proxies_are_refused():
    with pytest.raises(RuntimeError, match="only fences of the async proxy are known"):
        program("fence.proxy.alias;").decode("test")
    program("fence.acq_rel.gpu; fence.sc.cta; membar.cta; griddepcontrol.wait;").decode("test")
