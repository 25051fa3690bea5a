"""Whole launches: blocks over SMs, kinds of blocks, memory and overheads."""

import random
import struct
from dataclasses import replace

import numpy as np
import pytest

from gpu_model import build
from gpu_model.sm import sass
from gpu_model.sm.architectures import H100
from gpu_model.sm.kernel import Kernel, Launch, Model, Stage, kernels, makespan
from tests.support.sass_text import function, listing
from tests.support.seeds import derived

SM = replace(H100, sms=2, launch_latency=0.0, kernel_seconds=1e-6, fork_seconds=5e-6)
# Block b runs b + 1 times through a loop of 10 cycles.
LINES = [
    ("S2R R0, SR_CTAID.X", 1, 0, 7, 0),
    ("IADD3 R0, R0, -0x1, RZ", 5, 7, 7, 1),
    ("ISETP.GE.AND P0, PT, R0, RZ, PT", 4),
    ("@P0 BRA {1}", 1),
    ("EXIT", 1),
]
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


def launch(blocks, kinds=None, **options):
    kernel = Kernel(function(LINES), 255, 0, 8)
    kinds = list(range(blocks)) if kinds is None else kinds
    given = {"threads": 1024 // 4, "shared": 0, "parameters": struct.pack("<q", 0)} | options
    return Launch(kernel, (blocks, 1, 1), kinds=kinds, **given)


class TestMakespan:
    def test_one_at_a_time(self):
        assert makespan([(3, 1.0), (4, 1.0), (5, 1.0)], 1) == 12

    def test_two_sms(self):
        assert makespan([(3, 1.0), (4, 1.0), (5, 1.0)], 2) == 8
        assert makespan([(5, 1.0), (4, 1.0), (3, 1.0)], 2) == 7  # longest first

    def test_blocks_that_share_an_sm(self):
        assert makespan([(6, 1 / 3)] * 6, 2) == 6
        assert makespan([(6, 1 / 3)] * 7, 2) == 12

    def test_a_large_block_waits_for_room(self):
        assert makespan([(4, 0.5), (10, 0.5), (3, 1.0)], 1) == 13

    def test_none(self):
        assert makespan([], 4) == 0

    @pytest.mark.parametrize("seed", range(20))
    def test_whole_blocks_as_a_list_of_machines(self, seed):
        rng = random.Random(derived(seed))
        jobs = [rng.randint(1, 50) for _ in range(rng.randint(1, 60))]
        sms = rng.randint(1, 7)
        ends = [0] * sms
        for job in jobs:
            ends[ends.index(min(ends))] += job
        assert makespan([(job, 1.0) for job in jobs], sms) == max(ends)


@needs_compiler
class TestModel:
    def test_each_kind_of_block_has_its_own_time(self):
        model, made = Model(SM), launch(4)
        times = [model.block(made, kind).cycles for kind in range(4)]
        assert np.diff(times).tolist() == pytest.approx([10, 10, 10])

    def test_a_kind_is_the_middle_one_of_its_blocks(self):
        made = launch(5, kinds=["a", "a", "a", "b", "b"])
        assert made.examples == {"a": 1, "b": 4}
        model = Model(SM)
        one, other = (model.block(made, kind).cycles for kind in "ab")
        assert other - one == pytest.approx(30)

    def test_a_stage_is_its_list_of_blocks(self):
        model, made = Model(SM), launch(4)
        found = model.stage(Stage("x", [made], 0.0))
        assert model.occupancy(made).blocks == 1
        times = [model.block(made, kind).cycles for kind in range(4)]
        assert found.cycles == pytest.approx(max(times[0] + times[2], times[1] + times[3]))
        assert found.seconds == pytest.approx(found.cycles / SM.clock + 1e-6)
        both = model.stage(Stage("x", [made, launch(2)], 0.0))
        assert both.seconds > found.seconds + 5e-6

    def test_memory_and_arithmetic_hide_each_other_but_for_a_part(self):
        model, made = Model(SM), launch(4)
        time = model.stage(Stage("x", [made], 0.0)).cycles / SM.clock
        same = model.stage(Stage("x", [made], time * SM.dram))
        assert same.dram_seconds == pytest.approx(time)
        assert same.seconds == pytest.approx(2**0.25 * time + 1e-6)
        assert model.stage(Stage("x", [made], 9 * time * SM.dram)).bound == "memory"

    def test_other_rates_change_seconds_alone(self):
        model, made = Model(SM), launch(4)
        other = model.at(2 * SM.clock, 3 * SM.dram, 0.0)
        (found, faster) = (
            each.stage(Stage("x", [made], 1e-9 * SM.dram)) for each in (model, other)
        )
        assert faster.cycles == found.cycles
        parts = (found.cycles / SM.clock / 2, 1e-9 / 3)
        assert faster.seconds == pytest.approx(sum(part**4 for part in parts) ** 0.25)

    def test_bytes_alone(self):
        found = Model(SM).stage(Stage("x", [], 1e6))
        assert found.seconds == pytest.approx(1e6 / SM.dram + 1e-6)
        assert found.bound == "memory"


def test_wrong_launches():
    with pytest.raises(ValueError, match=r"kinds: expected one per block \(3\), got 2"):
        launch(3, kinds=[0, 0])
    with pytest.raises(ValueError, match="parameters: expected 8 bytes, as kernel takes, got 4"):
        launch(1, parameters=b"1234")


USAGE = """
 Function kernel:
  REG:247 STACK:0 SHARED:{shared} LOCAL:0 CONSTANT[0]:{constants} TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.mark.parametrize(("arch", "shared", "start"), [("sm_80", 512, 352), ("sm_90a", 1536, 528)])
def test_usage(arch, shared, start):
    functions = sass.parse(listing(["EXIT"], arch))
    usage = USAGE.format(shared=shared, constants=start + 40)
    found = kernels(functions, usage)["kernel"]
    assert (found.registers, found.shared, found.parameters) == (247, 512, 40)
    with pytest.raises(ValueError, match="usage: expected a line for kernel"):
        kernels(functions, usage.replace("kernel", "other"))
