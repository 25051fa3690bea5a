"""The primitives of kernels on a GPU: the same checks that the model of a block passes."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_model import conformance
from tests.support.cuda_checks import GPU_ONLY
from tests.support.paths import ROOT

DTYPES = [torch.bfloat16, torch.float16]

pytestmark = GPU_ONLY


def compiled(source: str, folder: Path, *options: str) -> Callable[..., None]:
    """Runs an exported function of a source, compiled with these options, and waits for it."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    compiler = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    library = folder / f"{source}.so"
    command = [compiler, "-std=c++20", "--expt-relaxed-constexpr", *options, "-shared"]
    command += ["-Xcompiler=-fPIC", f"-I{ROOT / 'csrc'}", f"-I{ROOT}"]
    command += [str(ROOT / "gpu_model" / "kernels" / source), "-o", str(library)]
    subprocess.run(command, check=True)
    functions = ctypes.CDLL(str(library))

    def argument(x: torch.Tensor | int | None) -> ctypes.c_void_p | ctypes.c_int64:
        if isinstance(x, int):
            return ctypes.c_int64(x)
        return ctypes.c_void_p(None if x is None else x.data_ptr())

    def run(name: str, *arguments: torch.Tensor | int | None) -> None:
        torch.cuda.synchronize()
        status = getattr(functions, name)(*map(argument, arguments))
        assert status == 0, f"{name}: error {status}"

    return run


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    return compiled("conformance.cu", tmp_path_factory.mktemp("conformance"), "-arch=native")


@pytest.mark.parametrize("dtype", DTYPES)
def test_mma(call, dtype):
    conformance.check_mma(call, "cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wgmma(tmp_path, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    sm90a = "-gencode=arch=compute_90a,code=sm_90a"
    call = compiled("conformance_sm90a.cu", tmp_path, sm90a)
    conformance.check_wgmma(call, "cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack(call, dtype):
    conformance.check_pack(call, "cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_of_attention(call, dtype):
    conformance.check_tile(call, "cuda", dtype)


@pytest.mark.parametrize("threshold", conformance.THRESHOLDS)
def test_dropout_of_pairs(call, threshold):
    conformance.check_decisions(call, "cuda", threshold)


@pytest.mark.parametrize("check", ["check_matrices", "check_shuffle", "check_ballot", "check_copy"])
def test_data_movement(call, check):
    getattr(conformance, check)(call, "cuda")
