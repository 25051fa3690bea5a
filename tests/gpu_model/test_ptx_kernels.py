"""The interpreter knows every instruction of every kernel that nvcc makes, tested or not."""

import pytest

from gpu_model import build
from gpu_model.ptx import compiler
from gpu_model.ptx.interpreter import program_of

pytestmark = pytest.mark.skipif(compiler.nvcc() is None, reason="needs nvcc")

FAMILIES = [
    path.stem for path in sorted(build.KERNELS.glob("*.cpp")) if any(compiler.cuda_sources(path))
]


def test_every_cuda_source_is_in_a_family():
    sources = {p for f in FAMILIES for p in compiler.cuda_sources(build.KERNELS / f"{f}.cpp")}
    assert sources >= set(build.CSRC.glob("*/*.cu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_is_understood(family):
    program = program_of(build.KERNELS / f"{family}.cpp", "80")
    kernels = program.kernels()
    assert kernels
    for kernel in kernels:
        program.decode(kernel)
