"""The PTX interpreter knows the forms of sm_90a's asynchronous instructions that ptxas does."""

from __future__ import annotations

import subprocess

import pytest

from gpu_model import build
from gpu_model.ptx import compiler
from gpu_model.ptx.interpreter import Program

pytestmark = [
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(compiler.nvcc() is None, reason="needs nvcc"),
]
SOURCE = build.ROOT / "tests" / "support" / "async_forms.cu"


def test_what_ptxas_assembles_is_decoded(tmp_path):
    command = [compiler.nvcc(), "-arch=sm_90a", "-cubin", "-o", str(tmp_path / "forms.cubin")]
    done = subprocess.run([*command, str(SOURCE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = compiler.ptx(SOURCE, "90a")
    Program({"forms.ptx": text}).decode("forms")
