"""The primitives of kernels on a GPU: the same checks that the model of a block passes."""

import ctypes
import os
import shutil
import subprocess

import pytest
import torch

from gpu_model import conformance
from tests.support.cuda_checks import GPU_ONLY
from tests.support.paths import ROOT

DTYPES = [torch.bfloat16, torch.float16]

pytestmark = GPU_ONLY


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """Runs an exported function of conformance.cu, compiled for this GPU, and waits for it."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    compiler = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    library = tmp_path_factory.mktemp("conformance") / "conformance.so"
    command = [compiler, "-std=c++20", "--expt-relaxed-constexpr", "-arch=native", "-shared"]
    command += ["-Xcompiler=-fPIC", f"-I{ROOT / 'csrc'}", f"-I{ROOT}"]
    command += [str(ROOT / "gpu_model" / "kernels" / "conformance.cu"), "-o", str(library)]
    subprocess.run(command, check=True)
    functions = ctypes.CDLL(str(library))

    def run(name: str, *arguments: torch.Tensor | int) -> None:
        torch.cuda.synchronize()
        status = getattr(functions, name)(
            *(
                ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else ctypes.c_int64(x)
                for x in arguments
            )
        )
        assert status == 0, f"{name}: error {status}"

    return run


@pytest.mark.parametrize("dtype", DTYPES)
def test_mma(call, dtype):
    conformance.check_mma(call, "cuda", dtype)


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
