"""Compiles kernel sources for the host model, with the C++ compiler that $CXX names.

One library is one .cpp file that includes the .cu files it runs. A library is compiled again when
its source, any header or kernel of the tree, the compiler or a flag has changed.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CSRC = ROOT / "csrc"
HERE = ROOT / "tests" / "host_cuda"
BUILD = ROOT / "build" / "host_cuda"
FLAGS = [
    *("-O2", "-g1", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden"),
    # Kernels keep their pragmas for nvcc; fortified longjmp refuses to change stacks.
    *("-Wall", "-Werror", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE"),
    f"-ffile-prefix-map={ROOT}/=",
    *(f"-I{folder}" for folder in (CSRC, ROOT / "tests", HERE / "include")),
]
X86_64_V3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}


def compiler() -> list[str] | None:
    """$CXX, which may hold options, or g++; None if it is not there."""
    command = os.environ.get("CXX", "g++").split()
    path = shutil.which(command[0])
    return None if path is None else [path, *command[1:]]


@cache
def _machine_flags() -> list[str]:
    info = Path("/proc/cpuinfo")
    if platform.machine() == "x86_64" and info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("flags")]
        if lines and set(lines[0].split()) >= X86_64_V3:
            return ["-march=x86-64-v3"]
    return []


@cache
def _version(command: str) -> bytes:
    return subprocess.run([command, "--version"], capture_output=True, check=True).stdout


def _sources() -> list[Path]:
    files = [path for folder in (CSRC, HERE) for path in folder.rglob("*")]
    return sorted(path for path in files if path.suffix in (".h", ".cu", ".cuh"))


def load(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The library of one .cpp file, compiled if need be into build/host_cuda.

    Args:
        source: includes "host_cuda/c_api.h" first, then kernels, and exports functions with
            BU_EXPORT.
        flags: more compiler options.

    Raises:
        RuntimeError: there is no compiler, or it reports an error.
    """
    source = Path(source).resolve()
    command = compiler()
    if command is None:
        raise RuntimeError(f"no C++ compiler: {os.environ.get('CXX', 'g++')!r} was not found")
    command += [*FLAGS, *_machine_flags(), *flags]
    digest = hashlib.sha256(_version(command[0]))
    digest.update("\0".join(command).encode())
    for path in [source, *_sources()]:
        digest.update(str(path).encode() + b"\0" + path.read_bytes())
    library = BUILD / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        temporary = library.with_name(f"{library.name}.{os.getpid()}.tmp")
        done = subprocess.run(
            [*command, str(source), "-o", str(temporary)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{source.name} does not compile:\n{done.stderr}")
        os.replace(temporary, library)
    return ctypes.CDLL(str(library))
