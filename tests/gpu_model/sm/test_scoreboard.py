"""Cycles of programs that can be counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from gpu_model import build
from gpu_model.sm.architectures import A100, ARCHITECTURES, H100, cost
from gpu_model.sm.sass import Instruction
from gpu_model.sm.scoreboard import simulate, steady
from gpu_model.sm.walk import WarpTrace
from tests.support.sass_text import NONE, function
from tests.support.seeds import derived

if build.compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

SM = replace(H100, launch_latency=100.0)
ALU = "IADD3 R0, R1, R2, RZ"
HMMA = "HMMA.16816.F32.BF16 R4, R8, R12, RZ"


def trace(code, active=True):
    code = np.array(code, np.int32)
    return WarpTrace(code, np.full(len(code), active), np.zeros(len(code), np.int32))


def run(lines, warps=1, architecture=SM, active=True, **options):
    """One block whose warps execute all lines once."""
    code = function([*lines, ("EXIT", 1)])
    block = [trace(range(len(lines) + 1), active)] * warps
    return simulate(architecture, code, [block], **options)


@pytest.mark.parametrize("greedy", [False, True])
class TestIssue:
    def test_stall_counts_add_up(self, greedy):
        lines = [(ALU, 5), ("FADD R0, R0, R0", 3), ("NOP", 9)]
        assert run(lines, greedy=greedy).cycles == 5 + 3 + 9 + 1

    def test_one_warp_issues_at_most_once_a_cycle(self, greedy):
        assert run([("NOP", 0)] * 50, greedy=greedy).cycles == 51

    def test_partitions_issue_side_by_side(self, greedy):
        lines = [("FADD R0, R0, R0", 1)] * 50
        assert run(lines, warps=4, greedy=greedy).cycles == 51
        assert run(lines, warps=8, greedy=greedy).cycles == 102

    def test_a_pipe_takes_one_instruction_at_a_time(self, greedy):
        assert run([(ALU, 1)] * 50, warps=8, greedy=greedy).cycles == pytest.approx(200, abs=3)
        # Another pipe's instructions go in between.
        mixed = [(ALU, 1), ("FADD R0, R0, R0", 1)] * 50
        assert run(mixed, warps=8, greedy=greedy).cycles == pytest.approx(204, abs=5)

    @pytest.mark.parametrize("architecture", [A100, H100], ids=lambda a: a.name)
    def test_tensor_cores(self, greedy, architecture):
        result = run([(HMMA, 1)] * 60, warps=8, architecture=architecture, greedy=greedy)
        assert result.cycles == pytest.approx(120 * architecture.tensor_busy, rel=0.02)
        assert result.busy["tensor"] == pytest.approx(120 * architecture.tensor_busy)
        assert result.busy["issue"] == 122

    def test_the_path_to_shared_memory_is_the_whole_sms(self, greedy):
        lines = [("LDSM.16.M88.4 R4, [R0]", 1)] * 40
        assert run(lines, warps=4, greedy=greedy).cycles == pytest.approx(4 * 160, abs=20)
        assert run(lines, warps=1, greedy=greedy).cycles == pytest.approx(160, abs=20)

    def test_instructions_without_a_thread_take_a_slot_only(self, greedy):
        lines = [("LDSM.16.M88.4 R4, [R0]", 2, 0, NONE, 0), ("NOP", 1, NONE, NONE, 1)]
        assert run(lines, active=False, greedy=greedy).cycles == 2 + 1 + 1


def test_a_chain_of_loads_takes_their_latencies():
    lines = [("LDS R0, [R0]", 1, 2, NONE, 0), *[("LDS R0, [R0]", 1, 2, NONE, 0b100)] * 9]
    lines.append(("NOP", 1, NONE, NONE, 0b100))
    assert run(lines).cycles == pytest.approx(10 * SM.shared_latency + 2, abs=1)


def test_operands_are_free_before_the_result_is_there():
    store = ("STS [R0], R1", 1, NONE, 0, 0)
    overwrite = ("MOV R1, RZ", 1, NONE, NONE, 1)
    assert 5 < run([store, overwrite]).cycles < SM.shared_latency


def test_other_warps_hide_latency():
    lines = [("MUFU.EX2 R0, R0", 1, 0, NONE, 0), ("FADD R0, R0, R0", 4, NONE, NONE, 1)] * 20
    alone, four = (run(lines, warps=4 * n).cycles for n in (1, 2))
    assert alone == pytest.approx(20 * 22, abs=25)
    assert four < 1.1 * alone  # two warps a partition


class TestBarriers:
    def test_the_first_warp_waits_for_the_last(self):
        slow = [("NOP", 15)] * 20
        code = function([*slow, ("BAR.SYNC.DEFER_BLOCKING 0x0", 1), ("EXIT", 1)])
        quick, late = trace([20, 21]), trace(range(22))
        expected = 300 + SM.barrier_latency + 2
        assert simulate(SM, code, [[quick, late]]).cycles == pytest.approx(expected, abs=2)
        # Blocks do not wait for each other.
        two = simulate(SM, code, [[quick], [late]])
        assert two.cycles == pytest.approx(expected, abs=2)

    def test_warps_that_have_ended_are_not_waited_for(self):
        code = function([("NOP", 15), ("BAR.SYNC.DEFER_BLOCKING 0x0", 1), ("EXIT", 1)])
        assert simulate(SM, code, [[trace([1, 2]), trace([0, 2])]]).cycles > 0

    def test_one_after_the_other(self):
        lines = [("BAR.SYNC.DEFER_BLOCKING 0x0", 1), ("NOP", 3)] * 10
        assert run(lines, warps=16).cycles > 10 * SM.barrier_latency

    def test_those_of_a_few_warps(self):
        code = function([("BAR.SYNC 0x1, 0x40", 1), ("NOP", 15), ("EXIT", 1)])
        block = [trace([0, 2]), trace([0, 2]), trace([1, 2])]
        assert simulate(SM, code, [block]).cycles < 40

    def test_no_one_comes(self):
        code = function([("BAR.SYNC 0x1, 0x80", 1), ("NOP", 1), ("EXIT", 1)])
        with pytest.raises(ValueError, match="wait for each other for ever"):
            simulate(SM, code, [[trace([0, 1]), trace([1])]])


@pytest.mark.parametrize(("left", "waits"), [(0, 2), (1, 1), (2, 0)])
def test_waits_for_copies(left, waits):
    """Two groups, the second started 200 cycles after the first."""
    copy, commit = ("LDGSTS.E.BYPASS.128 [R0], [R2.64]", 1), ("LDGDEPBAR", 1)
    pause = [("NOP", 10)] * 20
    lines = [copy, commit, *pause, copy, commit, (f"DEPBAR.LE SB0, {left:#x}", 1)]
    landed = {0: 204, 1: SM.copy_latency, 2: SM.copy_latency + 202}[waits]
    assert run(lines).cycles == pytest.approx(landed, abs=10)


@pytest.mark.parametrize("wait", ["SB2, 0x0", "SB1, 0x0, {{2}}", "SB0, 0x0, {{3,2}}"])
def test_waits_for_barriers_by_an_instruction(wait):
    load = ("LDS R0, [R0]", 1, 2, NONE, 0)
    want = run([load, ("NOP", 1, NONE, NONE, 0b100)]).cycles
    assert run([load, (f"DEPBAR.LE {wait}", 1)]).cycles == pytest.approx(want, abs=2)
    assert run([load, ("DEPBAR.LE SB4, 0x0", 1)]).cycles < want / 2


class TestRepeats:
    lines = ([("NOP", 10)] * 10,)

    def test_a_block_begins_again_after_the_launch_latency(self):
        assert run(self.lines[0], repeats=3).cycles == 3 * 101 + 2 * 100

    def test_steady_counts_what_one_block_takes(self):
        code = function([*self.lines[0], ("EXIT", 1)])
        result = steady(SM, code, [trace(range(11))], slots=2)
        assert result.cycles == pytest.approx((101 + 100) / 2)

    def test_of_what_fills_a_pipe_all_of_it(self):
        code = function([*[(HMMA, 1)] * 100, ("EXIT", 1)])
        result = steady(SM, code, [trace(range(101))] * 4, slots=4)
        assert result.cycles == pytest.approx(100 * SM.tensor_busy, rel=0.05)
        assert result.bound.startswith("tensor (")

    def test_latency_is_named_where_no_pipe_is_busy(self):
        code = function([*[(HMMA, 15)] * 10, ("EXIT", 1)])
        assert steady(SM, code, [trace(range(11))], 1).bound.startswith("latency, then tensor (")


@pytest.mark.parametrize("seed", range(20))
def test_no_faster_than_its_pipes_and_its_slowest_warp(seed):
    rng = np.random.default_rng(derived(seed))
    texts = [HMMA, ALU, "FADD R0, R0, R0", "MUFU.EX2 R0, R0", "LDS.128 R0, [R0]", "NOP"]
    lines = [(str(rng.choice(texts)), int(rng.integers(1, 8))) for _ in range(60)]
    code = function([*lines, ("EXIT", 1)])
    blocks = [[trace([*rng.permutation(60), 60]) for _ in range(4)] for _ in range(3)]
    stalls = max(sum(stall for _, stall in lines), 1) + 1
    for greedy in (False, True):
        result = simulate(SM, code, blocks, greedy=greedy)
        assert result.cycles >= stalls
        assert result.cycles + 15 >= max(result.busy.values())
        assert result.cycles <= stalls + sum(result.busy.values()) + 200
        assert result == simulate(SM, code, blocks, greedy=greedy)


class TestRefusals:
    def test_listings_without_control_codes(self):
        code = function([ALU, "EXIT"])
        code.instructions = [Instruction(i.address, i.text) for i in code.instructions]
        with pytest.raises(ValueError, match="control codes: expected a listing that has them"):
            simulate(SM, code, [[trace([0, 1])]])

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("UTMALDG.2D [UR4], [UR6]", "opcode: expected one that"),
            ("BAR.SCAN 0x1, 0x80", r"barrier: expected BAR\.SYNC, BAR\.RED or BAR\.ARV"),
            ("BAR.SYNC R2, 0x80", "barrier: expected a number that is known"),
            ("WARPGROUP.DEPBAR.LE gsb1, 0x0", r"wait: expected DEPBAR\.LE gsb0, n"),
            ("DEPBAR.LE SB3, 0x1", r"wait: expected DEPBAR\.LE SB0, n"),
        ],
    )
    def test_what_is_not_modelled(self, line, message):
        with pytest.raises(ValueError, match=message):
            run([line])


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda a: a.name)
def test_costs(architecture):
    def of(text, waves=0):
        return cost(architecture, Instruction(0, text), waves)

    assert of("LDS.128 R0, [R4]").busy == 4
    assert of("LDS R0, [R4]", waves=32).busy == 32
    assert of("LDSM.16.M88.4 R0, [R4]").busy == 4
    assert of("IMAD.WIDE.U32 R0, R4, R5, R6").busy == 2 * of("IMAD R0, R4, R5, R6").busy
    assert of("FFMA R0, R4, R5, R6").busy == architecture.fp32_busy
    assert of("UIADD3 UR4, UR5, 0x1, URZ").pipe == "uniform"
