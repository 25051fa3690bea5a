"""Occupancy, against figures of CUDA's occupancy calculator and another formula of ours."""

import pytest

from benchmarks.lib.cuda_kernels import Kernel
from gpu_model.sm.architectures import A100, ARCHITECTURES, H100
from gpu_model.sm.occupancy import occupancy


@pytest.mark.parametrize(
    ("architecture", "threads", "registers", "shared", "blocks", "limit"),
    [
        (A100, 256, 24, 0, 8, "warps"),
        (A100, 256, 64, 0, 4, "registers"),
        (A100, 256, 65, 0, 3, "registers"),
        (A100, 128, 255, 0, 2, "registers"),
        (A100, 1024, 64, 0, 1, "registers"),
        (A100, 32, 16, 0, 32, "blocks"),
        (A100, 128, 32, 48 * 1024, 3, "shared memory"),
        (A100, 128, 32, 80 * 1024, 2, "shared memory"),
        (A100, 128, 32, 163 * 1024, 1, "shared memory"),
        (H100, 128, 32, 75 * 1024, 3, "shared memory"),
        (H100, 128, 32, 75 * 1024 + 1, 2, "shared memory"),
        (H100, 256, 255, 227 * 1024, 1, "registers"),
    ],
)
def test_known_figures(architecture, threads, registers, shared, blocks, limit):
    found = occupancy(architecture, threads, registers, shared)
    assert (found.blocks, found.limit) == (blocks, limit)


@pytest.mark.parametrize("threads", [32, 64, 96, 128, 256, 512])
def test_registers_as_in_the_table_of_kernels(threads):
    for registers in range(16, 256):
        kernel = Kernel("k", "sm_80", registers)
        expected = kernel.blocks_per_sm(threads)
        if expected:
            assert occupancy(A100, threads, registers, 0).blocks == expected
        else:
            with pytest.raises(ValueError, match="registers: expected a block that fits"):
                occupancy(A100, threads, registers, 0)


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda a: a.name)
def test_more_shared_memory_than_a_block_can_have(architecture):
    with pytest.raises(ValueError, match="shared memory: expected a block that fits"):
        occupancy(architecture, 128, 32, architecture.block_shared + 1)
