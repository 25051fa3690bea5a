"""Compiles CUDA sources to PTX with nvcc, where that is installed."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from gpu_model import build

# Options of build_backend/native.py that change code, and lines for messages.
FLAGS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "-lineinfo", f"-I{build.CSRC}"]
_INCLUDE = re.compile(r'^#include "([^"]+\.cu)"', re.MULTILINE)
_FILE = re.compile(r'^(\s*\.file\s+\d+\s+)"([^"]+)"', re.MULTILINE)


@cache
def nvcc() -> str | None:
    """Its path, looked for where the build does; None if there is none."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        path = Path(os.environ.get(variable, "/nonexistent")) / "bin" / "nvcc"
        if path.is_file():
            return str(path)
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


@cache
def _version() -> str:
    return subprocess.run([nvcc(), "--version"], capture_output=True, text=True).stdout


def cuda_sources(library_source: Path) -> Iterator[Path]:
    """The .cu files that a source of gpu_model/kernels includes."""
    for name in _INCLUDE.findall(library_source.read_text()):
        folders = (build.CSRC, build.ROOT)
        yield next(folder / name for folder in folders if (folder / name).is_file())


def ptx(source: Path, arch: str) -> str:
    """The PTX of one .cu file; compiled if need be into build/gpu_model.

    Args:
        source: the .cu file.
        arch: compute capability as nvcc names it, such as "80" or "90a"; of a *_sm90a.cu always
            the latter.

    Raises:
        RuntimeError: there is no nvcc, or it reports an error.
    """
    if nvcc() is None:
        raise RuntimeError("no nvcc was found")
    arch = "90a" if source.stem.endswith("_sm90a") else arch  # as in build_backend/native.py
    command = [nvcc(), "--ptx", f"-arch=compute_{arch}", *FLAGS]
    text = build.compiled(command, _version(), source, ".ptx").read_text()
    return _FILE.sub(lambda line: f'{line[1]}"{_relative(line[2])}"', text)


def _relative(name: str) -> str:
    """Messages name files from the root of the tree."""
    path = Path(os.path.normpath(name))
    return str(path.relative_to(build.ROOT)) if path.is_relative_to(build.ROOT) else str(path)
