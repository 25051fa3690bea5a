"""Cycles of products that warpgroups make, of what their warps do meanwhile, and of arrivals."""

from dataclasses import replace

import numpy as np
import pytest

from gpu_model import build
from gpu_model.sm.architectures import A100, H100
from gpu_model.sm.scoreboard import simulate
from gpu_model.sm.state import Memory
from gpu_model.sm.walk import Walk, WarpTrace
from tests.support.sass_text import NONE, function

if build.compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

SM = replace(H100, launch_latency=100.0)
EXIT = ("EXIT", 1)


def product(columns, operands="gdesc[UR4]", last=False):
    text = f"HGMMA.64x{columns}x16.F32.BF16 R24, {operands}, R24"
    return (text + (", gsb0" if last else ""), 1)


def wait(left=0):
    return (f"WARPGROUP.DEPBAR.LE gsb0, {left:#x}", 1)


def trace(code):
    code = np.array(code, np.int32)
    return WarpTrace(code, np.full(len(code), True), np.zeros(len(code), np.int32))


def run(lines, groups=1, architecture=SM, **options):
    """Warpgroups that execute all lines once."""
    code = function([*lines, EXIT], "sm_90a")
    block = [trace(range(len(lines) + 1))] * (4 * groups)
    return simulate(architecture, code, [block], **options)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("columns", [8, 16, 32, 64, 128, 256])
def test_products_take_as_long_as_their_sums_or_their_operands(columns, groups):
    """With both operands in shared memory 4,096 operations a cycle from 64 columns on."""
    count = 24
    result = run([("WARPGROUP.ARRIVE", 1), *[product(columns)] * (count - 1),
                  product(columns, last=True), wait()], groups)  # fmt: skip
    one = max(columns / 2, 16 + columns / 4)
    assert result.cycles == pytest.approx(groups * count * one + SM.wgmma_latency, rel=0.02, abs=20)
    assert result.busy["tensor"] == pytest.approx(groups * count * columns / 2)
    assert result.busy["shared"] == pytest.approx(groups * count * (16 + columns / 4))


def test_operands_in_registers_need_less_of_shared_memory():
    operands = "R4, gdesc[UR8].tnspB"
    result = run([*[product(64, operands)] * 23, product(64, operands, last=True), wait()])
    assert result.busy["shared"] == pytest.approx(24 * 16)
    assert result.cycles == pytest.approx(24 * 32 + SM.wgmma_latency, abs=20)


@pytest.mark.parametrize(("left", "groups"), [(0, 3), (1, 2), (2, 1), (3, 0)])
def test_waits_for_groups_of_products(left, groups):
    """Three groups of one product each: a wait leaves so many of them."""
    result = run([product(256, last=True)] * 3 + [wait(left)])
    ends = groups * 128 + SM.wgmma_latency if groups else 0
    assert result.cycles == pytest.approx(ends, abs=6)


def test_other_instructions_go_on_beside_products():
    """32 exponentials of one warpgroup take 256 cycles, two products of another one as many."""
    exponentials = [("MUFU.EX2 R0, R0", 1)] * 32
    products = [product(256), product(256, last=True), wait()]
    code = function([*exponentials, EXIT, *products, EXIT], "sm_90a")
    groups = [trace(range(33))] * 4 + [trace(range(33, 37))] * 4
    assert simulate(SM, code, [groups]).cycles < 256 + SM.wgmma_latency + 20
    # One warpgroup does the same, as its products are asynchronous.
    assert run([product(128, last=True), *exponentials, wait()]).cycles < 256 + 20
    after = run([product(128, last=True), wait(), *exponentials]).cycles
    assert after == pytest.approx(64 + SM.wgmma_latency + 256, abs=20)


def test_products_are_done_when_all_four_warps_have_issued_theirs():
    """The last warp comes 300 cycles late."""
    lines = [product(64, last=True), wait(), EXIT]
    code = function([*[("NOP", 10)] * 30, *lines], "sm_90a")
    block = [trace(range(30, 33))] * 3 + [trace(range(33))]
    expected = 300 + 32 + SM.wgmma_latency
    assert simulate(SM, code, [block]).cycles == pytest.approx(expected, abs=5)
    assert simulate(SM, code, [block], repeats=2).cycles == pytest.approx(2 * expected + 100, abs=9)
    with pytest.raises(ValueError, match="wait for each other for ever"):
        simulate(SM, code, [[*block[:3], trace([0, 32])]])


def test_a_kernel_without_a_commit_waits_for_nothing():
    assert run([product(256), wait()]).cycles < 10


def test_older_architectures_have_no_wgmma():
    with pytest.raises(ValueError, match="opcode: expected one that"):
        run([product(64)], architecture=A100)


def test_arrivals_do_not_wait():
    """The first warp arrives early and goes on, the second waits for it and then for the third."""
    arrive, sync = ("BAR.ARV 0x1, 0x40", 1), ("BAR.SYNC 0x1, 0x40", 1)
    code = function([arrive, EXIT, sync, EXIT, *[("NOP", 15)] * 20, arrive, EXIT], "sm_90a")
    quick, waiting, late = trace([0, 1]), trace([2, 3]), trace(range(4, 26))
    assert simulate(SM, code, [[quick, waiting]]).cycles < SM.barrier_latency + 10
    expected = 300 + SM.barrier_latency
    assert simulate(SM, code, [[waiting, late]]).cycles == pytest.approx(expected, abs=5)
    with pytest.raises(ValueError, match="wait for each other for ever"):
        simulate(SM, code, [[waiting]])


def test_barriers_whose_number_is_in_a_register():
    """Each pair of warps has its own."""
    lines = ["S2R R0, SR_TID.X", "SHF.R.U32.HI R2, RZ, 0x6, R0", "IADD3 R2, R2, 0x1, RZ",
             "BAR.SYNC.DEFER_BLOCKING R2, 0x40", "EXIT"]  # fmt: skip
    walk = Walk(function(lines, "sm_90a"), 256, (1, 1, 1), (0, 0, 0), b"", Memory())
    traces = walk.run()
    assert [int(t.wavefronts[3]) for t in traces] == [2, 2, 3, 3, 4, 4, 5, 5]
    assert all(t.code.tolist() == [0, 1, 2, 3, 4] and t.active.all() for t in traces)
    assert simulate(SM, walk.function, [traces]).cycles < 100
    with pytest.raises(ValueError, match="wait for each other for ever"):
        simulate(SM, walk.function, [traces[::2]])


def test_barriers_with_an_unknown_number_are_refused():
    lines = ["LDG.E R2, [R4.64]", "BAR.SYNC.DEFER_BLOCKING R2, 0x40", "EXIT"]
    with pytest.raises(ValueError, match="the barrier at 0x10 is not known"):
        Walk(function(lines, "sm_90a"), 64, (1, 1, 1), (0, 0, 0), b"", Memory()).run()


def test_codes_of_real_listings():
    """As ptxas writes them: a descriptor with a suffix, sums that are not read, a last product."""
    lines = ["HGMMA.64x32x16.F32.BF16 R40, gdesc[UR4], RZ, !UPT",
             "HGMMA.64x32x16.F32.BF16 R24, R60, gdesc[UR16].tnspB, R24, gsb0"]  # fmt: skip
    first, second = function(lines, "sm_90a").instructions
    assert first.written == {f"R{n}" for n in range(40, 56)}
    assert second.written == {f"R{n}" for n in range(24, 40)}
    assert {f"R{n}" for n in range(60, 64)} | second.written | {"UR16", "UR17"} == second.read


def test_stalls_and_scoreboards_hold_for_products_too():
    text = product(64, last=True)[0]
    lines = [("S2UR UR4, SR_TID.X", 1, 0, NONE, 0), (text, 5, NONE, NONE, 1), wait()]
    assert run(lines).cycles == pytest.approx(20 + 32 + SM.wgmma_latency, abs=4)
