"""The PTX interpreter and the asynchronous instructions of sm_90a as nvcc makes them."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from gpu_model import build
from gpu_model.ptx import compiler
from gpu_model.ptx.interpreter import Program
from tests.support.ptx_kernels import POLICIES

pytestmark = [
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(compiler.nvcc() is None, reason="needs nvcc"),
]
SUPPORT = build.ROOT / "tests" / "support"


def test_what_ptxas_assembles_is_decoded(tmp_path):
    source = SUPPORT / "async_forms.cu"
    command = [compiler.nvcc(), "-arch=sm_90a", "-cubin", "-o", str(tmp_path / "forms.cubin")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    Program({"forms.ptx": compiler.ptx(source, "90a")}).decode("forms")


def test_a_compiled_ring():
    program = Program({"ring.ptx": compiler.ptx(SUPPORT / "bulk_ring.cu", "90a")})
    turns = 7
    x = torch.randint(-8, 9, (turns, 16, 128)).float()
    room = torch.zeros(x.numel() + 4)  # aligned to 16 bytes
    first = -room.data_ptr() % 16 // 4
    room[first : first + x.numel()] = x.flatten()
    data = room[first : first + x.numel()]
    for policy in POLICIES:
        for seed in range(3):
            out = torch.zeros(128)
            program.launch("ring", data, out, ctypes.c_int(turns), block=(160, 1, 1),
                           shared_bytes=1024 + 2 * 8192, policy=policy, seed=seed)  # fmt: skip
            assert torch.equal(out, x.sum((0, 1)))
