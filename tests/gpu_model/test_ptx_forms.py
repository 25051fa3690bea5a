"""The PTX interpreter and the asynchronous instructions of sm_90a as nvcc makes them."""

import ctypes
import math
import subprocess

import pytest
import torch

from benchmarks.lib import flash_3_loop
from gpu_model import build
from gpu_model.ptx import compiler
from gpu_model.ptx.interpreter import Program
from tests.support.ptx_kernels import POLICIES
from tests.support.seeds import derived
from tests.support.wgmma_kernels import Operand, gathered

pytestmark = pytest.mark.skipif(compiler.nvcc() is None, reason="needs nvcc")
SUPPORT = build.ROOT / "tests" / "support"


def test_what_ptxas_assembles_is_decoded(tmp_path):
    source = SUPPORT / "async_forms.cu"
    command = [compiler.nvcc(), "-arch=sm_90a", "-cubin", "-o", str(tmp_path / "forms.cubin")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    Program({"forms.ptx": compiler.ptx(source, "90a")}).decode("forms")


def aligned(x: torch.Tensor) -> torch.Tensor:
    """A flat copy that begins at a multiple of 16 bytes."""
    room = torch.zeros(x.numel() + 16, dtype=x.dtype)
    first = -room.data_ptr() % 16 // x.element_size()
    room[first : first + x.numel()] = x.flatten()
    return room[first : first + x.numel()]


def test_a_compiled_ring():
    program = Program({"ring.ptx": compiler.ptx(SUPPORT / "bulk_ring.cu", "90a")})
    turns = 7
    x = torch.randint(-8, 9, (turns, 16, 128)).float()
    data = aligned(x)
    for policy in POLICIES:
        for seed in range(3):
            out = torch.zeros(128)
            program.launch("ring", data, out, ctypes.c_int(turns), block=(160, 1, 1),
                           shared_bytes=1024 + 2 * 8192, policy=policy, seed=seed)  # fmt: skip
            assert torch.equal(out, x.sum((0, 1)))


@pytest.mark.parametrize(("groups", "name"), [(2, "two"), (3, "three")])
def test_compiled_attention_with_producers_and_consumers(groups, name):
    """Bulk copies, mbarriers, registers that change hands, and products that overlap."""
    program = Program({"loop.ptx": compiler.ptx(flash_3_loop.SOURCE, "90a")})
    generator = torch.Generator().manual_seed(derived(groups))
    tiles, queries = 3, 64 * groups
    q, k, v = (
        torch.randn(n, 64, generator=generator).bfloat16()
        for n in (queries, 128 * tiles, 128 * tiles)
    )

    def image(matrices: tuple[torch.Tensor, ...], k_major: bool) -> torch.Tensor:
        parts = []
        for matrix in matrices:
            part = torch.zeros(matrix.numel(), dtype=torch.int16)
            Operand(matrix if k_major else matrix.T.contiguous(), 1, k_major).write(part)
            parts.append(part)
        return aligned(torch.cat(parts))

    operands = image(q.split(64), True), image(k.split(128), True), image(v.split(128), False)
    weights = (0.2 * q.double() @ k.double().T * math.log(2)).softmax(-1)
    want = weights @ v.double()
    for policy in POLICIES:
        for seed in range(2):
            out = torch.zeros(32, queries * 2)
            program.launch(
                f"attention_of_{name}_warpgroups", *operands, out, ctypes.c_int(tiles),
                ctypes.c_float(0.2), block=(128 * (groups + 1), 1, 1),
                shared_bytes=1024 + groups * 8192 + 4 * 16384, policy=policy, seed=seed,
            )  # fmt: skip
            got = torch.cat([gathered(part.T, 64) for part in out.split(128, 1)])
            assert (got - want).abs().max() < 2e-2, (policy, seed)
