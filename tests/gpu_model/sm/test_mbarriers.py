"""mbarriers and bulk copies: what instructions do to them, and how long warps wait there."""

import struct
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.lib import cuda_sass
from gpu_model import build
from gpu_model.ptx.compiler import nvcc
from gpu_model.sm import mbarriers, sass
from gpu_model.sm.architectures import H100
from gpu_model.sm.mbarriers import MBarrierUse
from gpu_model.sm.scoreboard import simulate, steady
from gpu_model.sm.state import Memory
from gpu_model.sm.walk import Walk, WarpTrace
from tests.support.sass_text import NONE, function

if build.compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

SM = replace(H100, launch_latency=100.0)
AT = "UMOV UR4, 0x400"


def walk(lines, threads=32):
    return Walk(function([*lines, "EXIT"], "sm_90a"), threads, (1, 1, 1), (0, 0, 0), b"", Memory())


@pytest.mark.parametrize(("lines", "kind", "arrivals", "bytes_"), [
    (["UMOV UR6, 0x1ffff8", "SYNCS.EXCH.64 URZ, [UR4+0x8], UR6"], "init", 4, 0),
    (["SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x8], RZ"], "change", 32, 0),
    (["MOV R3, 0x3", "SYNCS.ARRIVE.TRANS64.ART0 RZ, [UR4+0x8], R3"], "change", 96, 0),
    (["MOV R3, 0x40", "SYNCS.ARRIVE.TRANS64 RZ, [UR4+0x8], R3"], "change", 32, 2048),
    (["MOV R3, 0x40", "SYNCS.ARRIVE.TRANS64.RED.A0TR RZ, [UR4+0x8], R3"], "change", 0, 2048),
    (["MOV R3, 0x40", "SYNCS.ARRIVE.TRANS64.RED.A0TX RZ, [UR4+0x8], R3"], "change", 0, -2048),
    (["SYNCS.ARRIVE.TRANS64.RED.A0T1 RZ, [UR4+0x8], RZ"], "change", 0, 32),
    (["MOV R3, 0x80000000", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x8], R3"], "wait", 1, 0),
    (["UMOV UR6, 0x800", "UMOV UR7, 0x408", "UMOV UR8, 0x200",
      "UBLKCP.S.G [UR6], [UR10], UR8"], "copy", 0, -8192),
])  # fmt: skip
def test_what_instructions_do(lines, kind, arrivals, bytes_):
    (trace,) = walk([AT, *lines]).run()
    assert trace.uses == (MBarrierUse(kind, 0x408, arrivals, bytes_),)
    assert trace.wavefronts[len(lines)] == 1


def test_arrivals_after_copies():
    lines = ["ARVCNT [UR4]", "TRANSCNT [UR4]"]
    (trace,) = walk(
        [AT, *(f"ARRIVES.LDGSTSBAR.64.{line}" for line in lines), "SYNCS.CCTL.IV [UR4]"]
    ).run()
    assert trace.uses == (
        MBarrierUse("change", 0x400, 32, 0, late=True),
        MBarrierUse("change", 0x400, 0, -32, late=True),
    )
    assert trace.wavefronts.tolist() == [0, 1, 2, 0, 0]


def test_only_threads_whose_guard_holds_arrive():
    lines = [AT, "S2R R0, SR_LANEID", "ISETP.GE.U32.AND P0, PT, R0, 0x1f, PT",
             "@P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ"]  # fmt: skip
    traces = walk(lines, 64).run()
    assert traces[0].uses == (MBarrierUse("change", 0x400, 1, 0),)
    assert [t.wavefronts[3] for t in traces] == [1, 1]


def test_what_is_not_known_is_refused():
    for line in ("SYNCS.ARRIVE.TRANS64.OPTOUT.A1T0 RZ, [UR4], RZ", "UBLKCP.G.S [UR4], [UR6], UR8"):
        with pytest.raises(ValueError, match="mbarrier: expected an instruction that is known"):
            walk([AT, line]).run()
    with pytest.raises(ValueError, match="mbarrier: expected operands that are known"):
        walk(["LDG.E R2, [R4.64]", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2], RZ"]).run()


def test_one_lane_is_elected():
    lines = ["ELECT P1, UR5, PT", "@!P1 EXIT", "UMOV UR6, 0x1ffff8", AT,
             "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ"]  # fmt: skip
    traces = walk(lines, 64).run()
    assert all(t.uses == (MBarrierUse("change", 0x400, 1, 0),) for t in traces)


def traces(*warps):
    """Of (line, use) each; a use may be None."""
    lines = [line for warp in warps for line, _ in warp]
    uses = tuple(dict.fromkeys(use for warp in warps for _, use in warp if use))
    at, found = 0, []
    for warp in warps:
        places = [0 if use is None else uses.index(use) + 1 for _, use in warp]
        code = np.arange(at, at + len(warp), dtype=np.int32)
        found.append(WarpTrace(code, np.full(len(warp), True), np.array(places, np.int32), uses))
        at += len(warp)
    return function(lines, "sm_90a"), found


def nops(cycles):
    return [(("NOP", 10), None)] * (cycles // 10)


EXIT = (("EXIT", 1), None)
INIT = (("SYNCS.EXCH.64 URZ, [UR4], UR6", 1), MBarrierUse("init", 0, 1, 0))
ARRIVE = (("SYNCS.ARRIVE.TRANS64 RZ, [UR4], R3", 1), MBarrierUse("change", 0, 1, 8192))
ARRIVE_ONLY = (("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", 1), MBarrierUse("change", 0, 1, 0))
COPY = (("UBLKCP.S.G [UR4], [UR6], UR8", 1), MBarrierUse("copy", 0, 0, -8192))
WAIT, NEXT = (
    (("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3", 1, 0, NONE, 0), MBarrierUse("wait", 0, p, 0))
    for p in (0, 1)
)


def cycles(*warps, **options):
    code, found = traces(*warps)
    return simulate(SM, code, [found], **options).cycles


def test_a_wait_ends_when_the_phase_does():
    late = cycles([INIT, *nops(500), ARRIVE_ONLY, EXIT], [*nops(20), WAIT, EXIT])
    assert late == pytest.approx(500 + SM.barrier_latency, abs=5)
    # The phase before the first one has ended.
    assert cycles([INIT, NEXT, EXIT]) < SM.barrier_latency + 10
    # That of the second phase waits for two arrivals.
    second = [INIT, *nops(300), ARRIVE_ONLY, *nops(300), ARRIVE_ONLY, EXIT]
    assert cycles(second, [*nops(20), WAIT, NEXT, EXIT]) == pytest.approx(620, abs=8)
    with pytest.raises(ValueError, match="wait for each other for ever"):
        cycles([INIT, ARRIVE_ONLY, WAIT, NEXT, EXIT])


def test_bulk_copies_take_their_latency_and_bandwidth():
    one = cycles([INIT, ARRIVE, COPY, WAIT, EXIT])
    assert one == pytest.approx(8192 / 128 + SM.copy_latency + SM.barrier_latency, abs=8)
    more = (ARRIVE[0], ARRIVE[1]._replace(bytes=4 * 8192))
    assert cycles([INIT, more, *[COPY] * 4, WAIT, EXIT]) == pytest.approx(one + 192, abs=8)
    with pytest.raises(ValueError, match="wait for each other for ever"):
        cycles([INIT, more, COPY, WAIT, EXIT])


def test_arrivals_wait_for_the_warp_s_copies():
    copy = (("LDGSTS.E.BYPASS.128 [R0], [R2.64]", 1), None)
    late = (("ARRIVES.LDGSTSBAR.64.ARVCNT [UR4]", 1),
            MBarrierUse("change", 0, 1, 0, late=True))  # fmt: skip
    landed = cycles([INIT, copy, *nops(100), late, WAIT, EXIT])
    assert landed == pytest.approx(SM.copy_latency + SM.barrier_latency, abs=10)


def test_blocks_begin_anew():
    code, found = traces([INIT, *nops(100), ARRIVE_ONLY, EXIT], [*nops(20), WAIT, EXIT])
    one = simulate(SM, code, [found]).cycles
    assert simulate(SM, code, [found], repeats=3).cycles == pytest.approx(3 * one + 200, abs=8)
    # Two blocks have each their own.
    assert simulate(SM, code, [found, found]).cycles == pytest.approx(one, abs=8)


@pytest.mark.skipif(nvcc() is None, reason="needs nvcc")
def test_a_ring_as_ptxas_makes_it(tmp_path):
    try:
        cuda_sass.find_tools()
    except SystemExit:
        pytest.skip("needs cuobjdump")
    source, object_ = build.ROOT / "tests/support/bulk_ring.cu", tmp_path / "ring.cubin"
    command = [nvcc(), "-arch=sm_90a", "-O3", "-cubin", "-o", str(object_), str(source)]
    subprocess.run(command, check=True)
    code = sass.parse(cuda_sass.listing("-sass", object_))["ring"]
    found = {}
    for turns in (2, 8, 16):
        parameters = struct.pack("<QQi", 1 << 40, 1 << 41, turns).ljust(24, b"\0")
        block = Walk(code, 160, (1, 1, 1), (0, 0, 0), parameters, Memory()).run()
        kinds = [
            [
                warp.uses[place - 1].kind
                for number, place in zip(warp.code, warp.wavefronts, strict=True)
                if place and code.instructions[number].name in mbarriers.NAMES
            ]
            for warp in block
        ]
        waits = [sum(use == "wait" for use in warp) for warp in kinds]
        assert waits == [turns] * 5, waits
        assert [warp.count("copy") for warp in kinds] == [0, 0, 0, 0, turns]
        assert [warp.count("init") for warp in kinds] == [4, 0, 0, 0, 0]
        found[turns] = simulate(SM, code, [block]).cycles
        assert steady(SM, code, block, 2).cycles > 0
    # Of two stages one is copied or read at a time: the copy, 16 loads and additions, two waits.
    each = (found[16] - found[8]) / 8 * 2
    assert SM.copy_latency + 64 < each < SM.copy_latency + 64 + 400
