"""FlashAttention-2's kernels as its own build makes them, for the model of an SM.

Its sdist is downloaded from the package index, and the kernels that BERT-like encoders run (head
dimension 64, bf16, no mask) are compiled into a folder that git ignores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib import cuda_sass
from gpu_model.sm.kernel import Kernel

VERSION = "2.8.3"
SOURCE = Path(__file__).with_name("flash_attention_kernels.cu")
# nvcc's flags in its setup.py.
FLAGS = [
    *("-O3", "-std=c++17", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__"),
    *("-U__CUDA_NO_HALF2_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"),
    *("--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math"),
]
# What its kernels include of PyTorch, so that they compile without a CUDA build of it: the state of
# the random numbers, with PyTorch's layout, and checks of calls that are not made.
STUBS = {
    "c10/cuda/CUDAException.h": """\
#pragma once
#include <cuda_runtime.h>
#define C10_CUDA_CHECK(call) static_cast<void>(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() static_cast<void>(cudaGetLastError())
""",
    "ATen/cuda/CUDAGeneratorImpl.h": """\
#pragma once
#include <cstdint>
namespace at {
struct PhiloxCudaState {
  union Payload {
    uint64_t val;
    int64_t* ptr;
  };
  Payload seed_{}, offset_{};
  uint64_t offset_intragraph_ = 0;
  bool captured_ = false;
};
}  // namespace at
""",
    "ATen/cuda/detail/UnpackRaw.cuh": """\
#pragma once
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <tuple>
namespace at::cuda::philox {
__host__ __device__ __forceinline__ std::tuple<uint64_t, uint64_t> unpack(PhiloxCudaState s) {
  if (s.captured_)
    return std::make_tuple(static_cast<uint64_t>(*s.seed_.ptr),
                           static_cast<uint64_t>(*s.offset_.ptr + s.offset_intragraph_));
  return std::make_tuple(s.seed_.val, s.offset_.val);
}
}  // namespace at::cuda::philox
""",
}
STUBS["ATen/cuda/CUDAGraphsUtils.cuh"] = STUBS["ATen/cuda/detail/UnpackRaw.cuh"]


@dataclass(frozen=True)
class Unit:
    """One kernel: FORWARD or BACKWARD; `even`: for sequences of one length that tiles divide."""

    direction: str
    dropout: bool
    even: bool

    @property
    def stem(self) -> str:
        return "_".join(
            [self.direction.lower(), *["dropout"] * self.dropout, *["even"] * self.even]
        )

    @property
    def defines(self) -> list[str]:
        flags = {"DROPOUT": self.dropout, "EVEN": self.even}
        return [f"-DBU_{self.direction}"] + [
            f"-DBU_{name}={'true' if on else 'false'}" for name, on in flags.items()
        ]


# Those that published figures are of, and those that packed sequences take.
UNITS = [Unit(d, False, True) for d in ("FORWARD", "BACKWARD")] + [
    Unit(d, dropout, False) for d in ("FORWARD", "BACKWARD") for dropout in (False, True)
]


def _run(command: list[str], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr}{done.stdout}")
    return done.stdout


def download(folder: Path) -> Path:
    """Unpacks the sdist into `folder`; the folder of its sources."""
    sources = folder / f"flash_attn-{VERSION}"
    if not sources.exists():
        pip, tools = [sys.executable, "-m", "pip"], folder / "tools"
        # pip runs its setup.py to learn its name: that imports wheel, and otherwise asks for nvcc.
        _run([*pip, "install", "--target", str(tools), "wheel"])
        environment = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
        environment["PYTHONPATH"] = os.pathsep.join([str(tools), os.environ.get("PYTHONPATH", "")])
        wanted = [f"flash-attn=={VERSION}", "--no-binary", "flash-attn", "--no-deps"]
        options = ["--no-build-isolation", "--dest", str(folder)]
        _run([*pip, "download", *wanted, *options], env=os.environ | environment)
        with tarfile.open(folder / f"flash_attn-{VERSION}.tar.gz") as tar:
            tar.extractall(folder / "unpacked", filter="data")
        os.replace(folder / "unpacked" / sources.name, sources)
    return sources


def build(folder: Path, archs: list[str], jobs: int = 2) -> None:
    """Compiles UNITS for each of `archs` (sm_80, sm_90) and the layout of their parameters, where
    they are not in `folder` yet."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = download(folder) / "csrc"
    nvcc = shutil.which("nvcc") or f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/nvcc"
    for name, text in STUBS.items():
        stub = folder / "stubs" / name
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(text)
    includes = [folder / "stubs", sources / "flash_attn", sources / "flash_attn" / "src"]
    includes.append(sources / "cutlass" / "include")
    command = [nvcc, *FLAGS, *(f"-I{path}" for path in includes), str(SOURCE)]
    todo = [
        ([*command, f"-arch={arch}", "-cubin", *unit.defines], folder / f"{unit.stem}.{arch}.cubin")
        for arch in archs
        for unit in UNITS
    ]
    todo.append(([*command, "-arch=sm_80"], folder / "layout"))

    def make(job: tuple[list[str], Path]) -> None:
        words, output = job
        if not output.exists():
            temporary = output.with_suffix(".tmp")
            _run([*words, "-o", str(temporary)])
            os.replace(temporary, output)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(make, todo))


def layout(folder: Path) -> dict[str, tuple[int, int]]:
    """(offset, bytes) of the parameters' fields; the sizes of structs and of shared memory."""
    lines = _run([str(folder / "layout")]).split("\n")
    return {name: (int(a), int(b)) for name, a, b in (x.split() for x in lines if x)}


def load(folder: Path, arch: str) -> dict[str, Kernel]:
    """The kernels by Unit.stem."""
    found = {}
    for unit in UNITS:
        file = folder / f"{unit.stem}.{arch}.cubin"
        found[unit.stem] = next(iter(cuda_sass.kernels(file).values()))
    return found
